"""Deltas of several micro-batches, which one step applies together."""

from __future__ import annotations

from typing import Any

from tagi_ddp.replica.protocol import Replica


class MicroBatches:
    """The sum of a replica's deltas of earlier micro-batches."""

    def __init__(self, replica: Replica) -> None:
        """Begin with none."""
        self._replica = replica
        # Backward replaces most layers' deltas; in the others they add up by themselves.
        self._layers = [not layer.accumulates for layer in replica.layers]
        self._sums: Any = None
        self._samples = 0

    def save(self, samples: int) -> None:
        """Add the present deltas, of ``samples`` samples, before backward replaces them."""
        self._replica.pull()
        if self._sums is None:
            self._sums = self._replica.zeros()
        self._replica.parameters.add_deltas_to(self._sums, self._layers)
        self._samples += samples

    def take(self) -> int:
        """Add the sums to the present deltas, and forget them; return their samples."""
        samples, self._samples = self._samples, 0
        if samples:
            self._replica.pull()
            self._replica.parameters.add_to_deltas(self._sums, self._layers)
            self._sums = None
        return samples
