"""Forward and backward of a replica, by the engine's kernels, the backend's, or torch's."""

from tagi_ddp.compute.by_batch import ComputeByBatch
from tagi_ddp.compute.choose import choose, make_compute
from tagi_ddp.compute.interface import Choice, Compute, LSTMStates, Precision
from tagi_ddp.compute.on_native import NativeCompute

__all__ = [
    "Choice",
    "Compute",
    "ComputeByBatch",
    "LSTMStates",
    "NativeCompute",
    "Precision",
    "choose",
    "make_compute",
]
