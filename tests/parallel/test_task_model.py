"""TaskModel calls a task's hooks in order and lets its loss run without autocast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tagi_ddp.parallel import Task, TaskModel

NAMES = ["on_before_forward_step", "run_model", "on_after_forward_step", "compute_loss"]
NAMES += ["on_after_compute_loss"]


class Recording(Task):
    def __init__(self, **config: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.autocast: list[bool] = []
        if config:
            self.config = SimpleNamespace(**config)

    def _called(self, name: str, result: Any, *args: Any) -> Any:
        self.calls.append((name, *args))
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return result

    def __getattribute__(self, name: str) -> Any:
        if name not in NAMES:
            return super().__getattribute__(name)
        results = {"run_model": "output", "compute_loss": "loss"}
        return lambda *args: self._called(name, results.get(name), *args)


class Network:
    """A network that is no torch module."""

    mode = ""

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Network()])
def test_order_of_the_hooks(model: Any) -> None:
    task = Recording()
    task_model: TaskModel[Any, Any, Any, Any] = TaskModel(task, model)
    assert task_model("batch", "state") == "loss"
    assert task.calls == [
        ("on_before_forward_step", model, "batch", "state"),
        ("run_model", model, "batch", "state"),
        ("on_after_forward_step", model, "batch", "output", "state"),
        ("compute_loss", model, "batch", "state", "output"),
        ("on_after_compute_loss", model, "batch", "output", "loss", "state"),
    ]


@pytest.mark.parametrize(
    ("config", "in_loss"),
    [
        ({}, False),
        ({"other": True}, False),
        ({"disable_autocast_for_loss": True}, False),
        ({"disable_autocast_for_loss": False}, True),
    ],
)
def test_autocast_of_the_loss(config: dict[str, bool], in_loss: bool) -> None:
    task = Recording(**config)
    with torch.autocast("cpu", torch.bfloat16):
        TaskModel(task, nn.Linear(2, 2))("batch", "state")
    assert task.autocast == [True, True, True, in_loss, True]


def test_a_task_that_is_a_module_brings_parameters() -> None:
    class WithScale(nn.Module, Task):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    names = [name for name, _ in TaskModel(WithScale(), nn.Linear(2, 2)).named_parameters()]
    assert names == ["task.scale", "model.weight", "model.bias"]
    assert not list(TaskModel(Task(), Network()).parameters())


def test_modes_reach_a_network() -> None:
    network = Network()
    task_model: TaskModel[Any, Any, Any, Any] = TaskModel(Task(), network)
    task_model.eval()
    assert (network.mode, task_model.training) == ("eval", False)
    task_model.train()
    assert (network.mode, task_model.training) == ("train", True)


def test_what_a_task_must_define() -> None:
    with pytest.raises(NotImplementedError, match="Task must define run_model"):
        TaskModel(Task(), nn.Linear(2, 2))(None, None)

    class Half(Task):
        def run_model(self, model: Any, batch: Any, state: Any) -> None:
            return None

    with pytest.raises(NotImplementedError, match="Half must define compute_loss"):
        TaskModel(Half(), nn.Linear(2, 2))(None, None)
