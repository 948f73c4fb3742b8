"""The choice, for each batch, of the faster of the backend's kernels and torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tagi_ddp.compute.cost import Work
from tagi_ddp.compute.interface import Compute
from tagi_ddp.compute.on_native import NativeCompute


class ComputeByBatch:
    """The choice of a compute for each batch, by `Work`.

    A compute that takes over continues from the states that layers keep between steps.
    """

    def __init__(
        self, model: Any, natively: NativeCompute, make_other: Callable[[], Compute]
    ) -> None:
        """Choose between ``natively`` and torch, which ``make_other`` makes when it is needed."""
        self._work = Work(model._cpp_backend.layers, natively.replica)
        self.natively = natively
        self._make_other = make_other
        self._other: Compute | None = None
        self._threads: int | None = None
        #: the compute of the last batch
        self.now: Compute = natively
        self._kept: tuple[Compute, int | None] = natively, None
        self.batch: int | None = None  # samples of the last batch; 0 if the inputs were tensors
        self.size = -1  # elements of the last inputs in an array; as many have the same compute

    def __call__(self, mean: Any) -> Compute:
        """Return the compute for these inputs; for tensors it is torch."""
        batch = 0
        self.size = -1
        if isinstance(mean, np.ndarray):
            self.size = mean.size
            batch = mean.size // self.natively.input_size
        return self.choose(batch)

    def choose(self, batch: int) -> Compute:
        """Return the compute for ``batch`` samples; 0 if the inputs are tensors."""
        if batch == self.batch:
            return self.now
        self.batch = batch
        chosen = self.natively if batch and self._work.is_native(batch) else self._torch()
        if chosen is not self.now:
            chosen.remember(self.now.memory())
            self.natively.sizes.clear()
            self.now = chosen
        return chosen

    def keep(self) -> None:
        """Do what `Compute.keep` does."""
        self._kept = self.now, self.batch
        self.now.keep()

    def restore(self) -> None:
        """Do what `Compute.restore` does; ``now`` is the compute at the time of `keep`."""
        self.now, self.batch = self._kept
        self.size = -1
        self.natively.sizes.clear()
        self.now.restore()

    def restore_if(self, refused: Any) -> bool:
        """Return False: only the host can restore."""
        return False

    def may_need_torch(self, batch: int) -> bool:
        """Return whether torch computes batches of up to ``batch`` samples."""
        return not self._work.is_native(batch)

    def set_threads(self, count: int) -> None:
        """Set the threads that torch uses; the backend's kernels use one."""
        self._threads = count
        if self._other is not None:
            self._other.set_threads(count)

    def _torch(self) -> Compute:
        if self._other is None:
            self._other = self._make_other()
            if self._threads is not None:
                self._other.set_threads(self._threads)
        return self._other
