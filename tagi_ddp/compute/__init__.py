"""Forward and backward of a replica, by the engine's kernels or by torch's."""

from tagi_ddp.compute.choose import choose, make_compute
from tagi_ddp.compute.interface import Choice, Compute, LSTMStates, Precision

__all__ = ["Choice", "Compute", "LSTMStates", "Precision", "choose", "make_compute"]
