"""Optimizers of torch modules on all ranks, and the schedule by which replicas synchronize.

torch is imported when one of its optimizers is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tagi_ddp.optim.schedule import Skips, Sync, SyncSchedule

if TYPE_CHECKING:
    from tagi_ddp.optim.daso import DASO, DataParallelMultiGPU
    from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer

_ON_TORCH = {
    "DASO": "daso",
    "DataParallel": "data_parallel",
    "DataParallelMultiGPU": "daso",
    "DataParallelOptimizer": "data_parallel",
}

__all__ = [
    "DASO",
    "DataParallel",
    "DataParallelMultiGPU",
    "DataParallelOptimizer",
    "Skips",
    "Sync",
    "SyncSchedule",
]


if not TYPE_CHECKING:  # Type checkers accept the names above, and no others.

    def __getattr__(name: str) -> Any:
        if name not in _ON_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if importlib.util.find_spec("torch") is None:
            raise ImportError(f"tagi_ddp.optim.{name} needs torch: pip install '.[torch]'")
        return getattr(importlib.import_module(f"{__name__}.{_ON_TORCH[name]}"), name)
