"""Data parallelism for torch modules: gradients are averaged over all ranks."""

from tagi_ddp.optim.data_parallel.module import DataParallel
from tagi_ddp.optim.data_parallel.optimizer import DataParallelOptimizer

__all__ = ["DataParallel", "DataParallelOptimizer"]
