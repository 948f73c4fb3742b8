"""Parallel training of torch and pytagi models: `dp`, `ddp`, `fsdp` and a trainer.

Importing this registers torch's backend "tagi_ddp", whose collectives run on the package's
communicators.
"""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError("tagi_ddp.parallel needs torch: pip install '.[parallel]'")

from tagi_ddp.parallel.callbacks import (
    BestCheckpoint,
    Callback,
    CSVLogger,
    EarlyStopping,
    TensorBoardLogger,
)
from tagi_ddp.parallel.checkpoints import State
from tagi_ddp.parallel.config import BaseTrainerConfig, CheckpointConfig, ParallelConfig
from tagi_ddp.parallel.likelihood import GaussianLoss
from tagi_ddp.parallel.mixin import ParallelMixin, TrainerParallelConfig
from tagi_ddp.parallel.posterior import PosteriorStatistics
from tagi_ddp.parallel.state_dicts import full_state_dict
from tagi_ddp.parallel.task_model import Task, TaskModel
from tagi_ddp.parallel.trainer import BaseTrainer
from tagi_ddp.parallel.wrappers import ddp, dp, fsdp
from tagi_ddp.torch_backend.process_group import ProcessGroup, register

register()

__all__ = [
    "BaseTrainer",
    "BaseTrainerConfig",
    "BestCheckpoint",
    "CSVLogger",
    "Callback",
    "CheckpointConfig",
    "EarlyStopping",
    "GaussianLoss",
    "ParallelConfig",
    "ParallelMixin",
    "PosteriorStatistics",
    "ProcessGroup",
    "State",
    "Task",
    "TaskModel",
    "TensorBoardLogger",
    "TrainerParallelConfig",
    "ddp",
    "dp",
    "fsdp",
    "full_state_dict",
]
