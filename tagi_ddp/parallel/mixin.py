"""ParallelMixin: a trainer whose model all processes train together."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from tagi_ddp.environment import detect, rank_and_size
from tagi_ddp.parallel import groups
from tagi_ddp.parallel.config import BaseTrainerConfig, ParallelConfig
from tagi_ddp.parallel.task_model import ModelT, TaskModel, TaskT
from tagi_ddp.parallel.trainer import BaseTrainer
from tagi_ddp.parallel.wrappers import dp
from tagi_ddp.sequential.accelerate import accelerate


@dataclass
class TrainerParallelConfig(BaseTrainerConfig):
    """The settings of a trainer and of its parallelism."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)


ParallelConfigT = TypeVar("ParallelConfigT", bound=TrainerParallelConfig)


class ParallelMixin(BaseTrainer[ParallelConfigT, ModelT, TaskT]):
    """A trainer for any number of processes: one, or those of a launcher.

    A torch module is moved to the GPU of the local rank, if there is one. A pytagi Sequential stays
    on its device, and torch computes it if it can. `dp` then wraps either.
    """

    config_type = TrainerParallelConfig

    def _get_task_model(self, task: TaskT, model: ModelT) -> Any:
        """Return a wrapped `TaskModel` on its device, with the dtype of the settings."""
        double = self.config.use_double_weight_precision
        task_model: TaskModel[ModelT, TaskT, Any, Any] = TaskModel(task, model)
        if isinstance(model, nn.Module):
            task_model.to(_device())
            if double:
                task_model._apply(_double)
        elif double:
            raise ValueError(
                "use_double_weight_precision must be False for a pytagi Sequential, got True: its "
                "parameters are float32"
            )
        elif self.world_size == 1 and hasattr(model, "_cpp_backend"):
            return TaskModel(task, accelerate(model))
        return dp(task_model, self.config.parallel)

    def _rank_and_size(self) -> tuple[int, int]:
        return rank_and_size()

    def _all_raise(self, is_module: bool) -> AbstractContextManager[None]:
        if is_module and self.world_size > 1:
            groups.initialise(self.config.parallel.timeout)  # It sends errors.
        return groups.all_raise()


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """Return floats as float64 and complex numbers as complex128; leave others as they are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", detect().local_rank % torch.cuda.device_count())
