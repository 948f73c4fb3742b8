"""The deltas that the next step applies: those of one batch, or the sums of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tagi_ddp.communicators import Buffer
from tagi_ddp.replica import Replica


class Accumulation:
    """The state between two steps: one forward and backward, or several under `no_sync`.

    ``forwarded`` is the number of samples of a forward pass that no backward has followed yet, and
    None if there is none; ``samples`` those behind the replica's present deltas, None without any.
    ``adds`` is True if deltas add up until the next step.
    """

    def __init__(self, replica: Replica) -> None:
        self.forwarded: int | None = None
        self.samples: int | None = None
        self.adds = False
        self._blocked = False  # True inside of `no_sync`
        self._replica = replica
        # Backward replaces most layers' deltas; in the others they add up by themselves.
        self._layers = [not layer.accumulates for layer in replica.layers]
        self._sums: Buffer | None = None  # of earlier micro-batches, with `_summed` samples
        self._summed = 0

    @property
    def between_steps(self) -> bool:
        """True if there are no deltas that a step would apply."""
        return self.samples is None and not self.adds

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up deltas until the step after the block."""
        self._blocked = self.adds = True
        try:
            yield
        finally:
            self._blocked = False

    def discard(self) -> None:
        """Drop all deltas, and a forward pass that no backward has followed yet."""
        self.forwarded = self.samples = self._sums = None
        self._summed, self.adds = 0, self._blocked

    def before_backward(self) -> int:
        """Save the deltas that a backward would replace; return its number of samples."""
        if self.forwarded is None:
            raise RuntimeError("backward() needs a forward() before it")
        if self.adds and self.forwarded and self.samples:
            self._replica.pull()
            if self._sums is None:
                self._sums = self._replica.zeros()
            self._replica.parameters.add_deltas_to(self._sums, self._layers)
            self._summed += self.samples
        return self.forwarded

    def after_backward(self) -> None:
        """Record the new deltas; those of an empty share replace none that add up."""
        if self.forwarded or not (self.adds and self.samples):
            self.samples = self.forwarded
        self.forwarded = None

    def take(self) -> int:
        """Write the sums of all deltas to the replica; return their number of samples."""
        if self._blocked:
            raise RuntimeError("step() inside no_sync() would let replicas differ; end the block")
        if self.samples is None:
            raise RuntimeError("step() needs a backward() before it")
        self._replica.pull()
        if self._sums is not None:
            self._replica.parameters.add_to_deltas(self._sums, self._layers)
        samples = self.samples + self._summed
        self._sums, self._summed = None, 0
        self.samples, self.adds = None, False
        return samples
