"""DASO: training on two levels, nodes and their ranks, in which nodes do not wait."""

from tagi_ddp.optim.daso.multi_gpu import DataParallelMultiGPU
from tagi_ddp.optim.daso.optimizer import DASO

__all__ = ["DASO", "DataParallelMultiGPU"]
