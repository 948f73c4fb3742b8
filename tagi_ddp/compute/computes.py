"""The computes of a network: the one that was chosen, or two of which each batch takes one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tagi_ddp.compute import native
from tagi_ddp.compute.interface import Choice, Precision
from tagi_ddp.compute.on_native import NativeCompute
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica import Replica

if TYPE_CHECKING:
    from tagi_ddp.compute.on_engine import EngineCompute
    from tagi_ddp.compute.on_torch import TorchCompute

# They have the same methods, which EngineCompute describes.
Compute: TypeAlias = "EngineCompute | NativeCompute | TorchCompute"


class Computes:
    """The compute of each batch: the chosen one, or the faster of the backend's and torch's.

    A compute that takes over continues from the states that layers keep between steps.

    now: the compute of the last batch. native: the backend's kernels, if they are among the
    computes. batch: the samples of the last batch if there is a choice, 0 if they came in a tensor;
    else None. size: the elements of the last inputs in an array; as many have the same compute.
    """

    def __init__(
        self,
        model: Any,
        replica: Replica,
        make_bucket: Callable[[], FloatArray],
        chosen: Choice,
        device: str,
        precision: Precision,
    ) -> None:
        """Compute ``model``, whose state is ``replica``.

        The deltas are written to a bucket, which ``make_bucket`` makes, unless they stay in the
        engine's layers or on a device.
        """
        self.bucket = make_bucket() if device == "cpu" and chosen != "engine" else None
        self._engine = model._cpp_backend
        self._make_torch = partial(_torch_compute, model, replica, self.bucket, device, precision)
        self._torch: TorchCompute | None = None
        self._limit: float | None = None  # see `native.limit`; None: there is no choice
        self.native: NativeCompute | None = None
        if chosen == "engine":
            from tagi_ddp.compute.on_engine import EngineCompute

            self.now: Compute = EngineCompute(model, replica)
        elif chosen == "torch":
            self.now = self._get_torch()
        else:
            assert self.bucket is not None
            self.now = self.native = NativeCompute(model, replica, self.bucket)
            if chosen == "auto":
                self._limit = native.limit(model._cpp_backend.layers, replica)
        self.takes_tensors = self._limit is not None or self.now.takes_tensors
        self.batch: int | None = None
        self.size = -1
        self._kept: tuple[Compute, int | None] = self.now, None

    def choose(self, mean: Any) -> Compute:
        """Return the compute for these inputs, flat; for tensors it is torch."""
        if self._limit is None or mean.size == self.size:
            return self.now
        assert self.native is not None
        in_array = isinstance(mean, np.ndarray)
        self.size = mean.size if in_array else -1
        return self.choose_for(mean.size // self.native.input_size if in_array else 0)

    def choose_for(self, batch: int) -> Compute:
        """Return the compute for ``batch`` samples; 0 if the inputs are tensors."""
        if batch == self.batch or self._limit is None:
            return self.now
        self.batch = batch
        assert self.native is not None
        chosen = self.native if 0 < batch <= self._limit else self._get_torch()
        if chosen is not self.now:
            chosen.remember(self.now.memory())
            self.native.sizes.clear()
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
        if self.native is not None:
            self.native.sizes.clear()
        self.now.restore()

    def restore_if(self, refused: Any) -> bool:
        """Do what `Compute.restore_if` does; if there is a choice, only the host can restore."""
        return self._limit is None and self.now.restore_if(refused)

    def set_threads(self, count: int) -> None:
        """Set the threads of the engine or of torch; the backend's kernels use one."""
        self._engine.set_threads(count)
        if self._torch is not None:
            self._torch.set_threads(count)

    def import_early(self, batch: int) -> None:
        """Import slow modules that batches of up to ``batch`` samples may need."""
        if self._limit is not None and batch > self._limit:
            import tagi_ddp.compute.on_torch  # noqa: F401

    def _get_torch(self) -> TorchCompute:
        if self._torch is None:
            self._torch = self._make_torch()
            self._torch.set_threads(self._engine.num_threads)
        return self._torch


def _torch_compute(*arguments: Any) -> TorchCompute:
    from tagi_ddp.compute.on_torch import TorchCompute

    return TorchCompute(*arguments)
