"""DASO: training on two levels, of which the upper one does not wait."""

from tagi_ddp.optim.daso.multi_gpu import DataParallelMultiGPU
from tagi_ddp.optim.daso.optimizer import DASO

__all__ = ["DASO", "DataParallelMultiGPU"]
