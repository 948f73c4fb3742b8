"""Rollback of the state that an abandoned step has changed."""

from __future__ import annotations

from typing import Any

from tagi_ddp.compute.computes import Computes
from tagi_ddp.engine.layers import walk
from tagi_ddp.replica import Replica

_STATEFUL = ("BatchNorm2d", "Embedding", "LSTM", "SLSTM", "SLinear")


class Rollback:
    """The running statistics, recurrent states and lasting deltas from before a step.

    Forward and backward change them. `keep` copies them when a step begins; `restore` restores the
    copy if the step is refused or repeated; `drop` drops it after a step that is applied.
    """

    def __init__(self, model: Any, computes: Computes, replica: Replica) -> None:
        #: True if the network has such state
        self.needed = any(layer.kind in _STATEFUL for layer in walk(model))
        self._computes = computes
        self._replica = replica
        self._kept = False

    def keep(self) -> None:
        """Copy the state."""
        self._computes.keep()
        self._replica.keep_statistics()
        self._kept = True

    def drop(self) -> None:
        """Drop the copy."""
        self._kept = False

    def restore(self) -> None:
        """Restore the copy, if there is one, and drop it."""
        if self._kept:
            self._computes.restore()
            self._replica.restore_statistics()
        self._kept = False

    def restore_if(self, refused: Any) -> None:
        """Restore the copy if ``refused``, a tensor on the replica's device, is true; then drop it.

        The host waits for ``refused`` only if the state cannot be restored on the device.
        """
        if self._kept:
            done = self._computes.restore_if(refused)
            done &= self._replica.restore_statistics_if(refused)
            if not done and bool(refused):
                self.restore()
        self._kept = False
