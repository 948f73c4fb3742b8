"""TaskModel, a task and its model as one module whose output is the loss; and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tagi_ddp.optim.models import all_params

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]

ModelT = TypeVar("ModelT")
TaskT = TypeVar("TaskT")
Batch = TypeVar("Batch")
Loss = TypeVar("Loss")


class Task:
    """Base of tasks, which define a model's output and loss, with hooks that do nothing.

    ``model`` is the trainer's model, or the DDPSequential of a Sequential. ``state`` is the
    progress of training. A task that has parameters is a torch.nn.Module as well. `compute_loss`
    runs without torch.autocast unless the task has ``config.disable_autocast_for_loss``, and that
    is False.
    """

    def on_before_forward_step(self, model: Any, batch: Any, state: Any) -> None:
        """Do something before the model runs."""

    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        """Return the model's output for the inputs of a batch."""
        raise NotImplementedError(f"{type(self).__name__} must define run_model")

    def on_after_forward_step(self, model: Any, batch: Any, output: Any, state: Any) -> None:
        """Do something between the model and the loss."""

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        """Return the loss, a mean over the batch's samples; it has ``backward()``."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_loss")

    def on_after_compute_loss(
        self, model: Any, batch: Any, output: Any, loss: Any, state: Any
    ) -> None:
        """Do something with the loss."""


class TaskModel(nn.Module, Generic[ModelT, TaskT, Batch, Loss]):
    """The module that is wrapped for data parallel training: forward and loss are one call.

    Args:
        task: an object with the methods of `Task`; if it is a module, this one has its parameters.
        model: a torch.nn.Module, a pytagi Sequential or a DDPSequential.
    """

    def __init__(self, task: TaskT, model: ModelT) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Batch, state: Any) -> Loss:
        """Return the loss of a batch."""
        task: Any = self.task
        task.on_before_forward_step(self.model, batch, state)
        output = task.run_model(self.model, batch, state)
        task.on_after_forward_step(self.model, batch, output, state)
        if getattr(getattr(task, "config", None), "disable_autocast_for_loss", True):
            device = next((each.device.type for each in self.parameters()), "cpu")
            with torch.autocast(device, enabled=False):
                loss: Loss = task.compute_loss(self.model, batch, state, output)
        else:
            loss = task.compute_loss(self.model, batch, state, output)
        task.on_after_compute_loss(self.model, batch, output, loss, state)
        return loss

    def train(self, mode: bool = True) -> TaskModel[ModelT, TaskT, Batch, Loss]:
        """Set the mode of training or evaluation, of a Sequential as well."""
        if not isinstance(self.model, nn.Module):
            model: Any = self.model
            model.train() if mode else model.eval()
        super().train(mode)
        return self


def check_factory(optimizer: Any, is_module: bool) -> None:
    """Raise TypeError unless it is a function, or None for a Sequential."""
    made = isinstance(optimizer, torch.optim.Optimizer)
    if callable(optimizer) and not made if is_module else optimizer is None:
        return
    takes = "a function of the parameters" if is_module else "None"
    got = f"an optimizer, {type(optimizer).__name__}" if made else repr(optimizer)
    like = ""
    if is_module and made:
        like = f": give one that makes it, like partial({type(optimizer).__name__}, lr=0.01)"
    raise TypeError(f"optimizer must be {takes} for this model, got {got}{like}")


def made_by(factory: OptimizerFactory, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a module's parameters; TypeError or ValueError if it is none."""
    optimizer = factory(module.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must return a torch.optim.Optimizer, got a {kind}")
    own, params = set(module.parameters()), all_params(optimizer)
    if others := sum(param not in own for param in params):
        raise ValueError(
            f"optimizer must hold only the parameters that it is given, but {others} of its "
            f"{len(params)} are another model's"
        )
    return optimizer
