"""The common posterior of the ranks of a group, and its merges."""

from __future__ import annotations

from typing import Any

import numpy as np

from tagi_ddp._backend import AdaptiveSum
from tagi_ddp.communicators import Communicator
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica import Replica
from tagi_ddp.replica.staging import Sum, broadcast, host_bucket
from tagi_ddp.update.compressed_sum import Compress, CompressedSum, Pending


class Consensus:
    """The posterior that the ranks of a group have in common; equal on all of them.

    ``adaptive``: merges average the changes in which ranks have learned alike, and sum the others
    (cpp_backend/update/adaptive_sum.h). ``agreement`` is then by layer how much alike, from 0 to 1,
    at the last merge. ``compress``: the format in which changes are sent.
    """

    def __init__(
        self,
        communicator: Communicator,
        replica: Replica,
        adaptive: bool,
        compress: Compress | None,
    ) -> None:
        self._replica, self._parameters = replica, replica.on_host
        self._compress = compress
        self._damping = AdaptiveSum(self._parameters) if adaptive else None
        size = self._parameters.size
        self.gaussians = np.zeros(2 * size, np.float32)
        # The bucket holds a change and its description.
        described = self._damping.described if self._damping else 0
        self.bucket = host_bucket(communicator, size, described)
        self.change, self._description = self.bucket[: 2 * size], self.bucket[2 * size :]
        self.steps = 0  # of this rank since its last change
        self.agreement = [0.0] * len(replica.layers)
        self.enter(communicator)
        self.begin()

    def enter(self, communicator: Communicator) -> None:
        """Switch to another group with the same posterior; drop the compression residual."""
        self._communicator = communicator
        self._compressed = None
        if self._compress and communicator.size > 1:
            self._compressed = CompressedSum(communicator, self._replica, self._compress)

    def begin(self) -> None:
        """Restart from the present posterior of the replica."""
        self._replica.parameters.read_posterior(self.gaussians)
        self.steps = 0
        if self._damping:
            self._damping.restart()
        if self._compressed:
            self._compressed.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for `load_state_dict`."""
        return {
            "gaussians": self.gaussians,
            "steps": self.steps,
            "agreement": list(self.agreement),
            "damping": memory_of(self._damping),
            "compressed": self._compressed.state_dict() if self._compressed else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for a consensus of the same settings."""
        self.gaussians[:] = state["gaussians"]
        self.steps = state["steps"]
        self.agreement = list(state["agreement"])
        remember(self._damping, state["damping"])
        if self._compressed:
            self._compressed.load_state_dict(state["compressed"])

    def take_over(self, source: int) -> None:
        """Copy the state of rank ``source`` to all ranks; a collective call."""
        memory = [self._damping.previous, self._damping.trust] if self._damping else []
        for buffer in (self.gaussians, *memory):
            broadcast(self._communicator, buffer, source, self._replica.device)

    def merge(self, now: FloatArray) -> list[int]:
        """Merge the ranks' changes; ``now`` is the posterior that this rank has reached alone.

        Returns how many parameters of each layer took only a part of the merge.
        """
        if self._communicator.size == 1:
            self.gaussians[:] = now
            self.steps = 0
            return [0] * len(self._replica.layers)
        self._parameters.change_since(now, self.gaussians, self.change)
        self.start().wait()
        self.agree()
        return self._parameters.add_change(self.gaussians, self.gaussians, self.change)

    def start(self) -> Pending:
        """Start to sum the ranks' changes; `change` holds this rank's."""
        if self._damping:
            self._damping.describe(self.change, self.gaussians, self.steps, self._description)
        self.steps = 0
        if self._compressed:
            return self._compressed.start(self.change, self._description, self.gaussians)
        return Sum(self._communicator, self.bucket, self._replica.device)

    def share(self, group: Communicator, root: int) -> None:
        """Send the sum from ``root`` to a group of ranks that have the same posterior.

        They wait twice as long as ``root``, which has waited for the sum.
        """
        broadcast(group, self.bucket, root, self._replica.device, 2 * group.timeout)

    def agree(self) -> None:
        """Damp the sum of all changes, in `change`, if ``adaptive``."""
        if self._damping:
            ranks = self._communicator.size
            self.agreement = self._damping.damp(
                self.change, self.gaussians, self._description, ranks
            )


def memory_of(damping: AdaptiveSum | None) -> dict[str, Any] | None:
    """Return the memory of the sums before, for `remember`."""
    if damping is None:
        return None
    return {"previous": damping.previous, "trust": damping.trust}


def remember(damping: AdaptiveSum | None, memory: dict[str, Any] | None) -> None:
    """Restore what `memory_of` has returned."""
    if damping is not None and memory is not None:
        damping.previous[:] = memory["previous"]
        damping.trust[:] = memory["trust"]
