"""The first step refuses what a checkpoint cannot hold; on ranks, compiled modules resume."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from parallel.support import torch_group
from parallel.test_mixin import BATCH, Fit, data, settings, torch_net
from tagi_ddp.parallel import Callback, ParallelConfig, ParallelMixin


class Extra(nn.Sequential):
    def get_extra_state(self) -> Any:
        return {"odd": {1}}


class OddState(torch.optim.Adam):
    """Keeps an object in its state once it has made a step."""

    def step(self, *args: Any) -> Any:
        super().step(*args)
        for state in self.state.values():
            state["odd"] = {1}


class OddGroup(torch.optim.Adam):
    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.param_groups[0]["odd"] = {1}


class OddCallback(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"odd": {1}}


class OddTask(nn.Module, Fit):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        Fit.__init__(self)

    def get_extra_state(self) -> Any:
        return {"odd": {1}}


def odd(name: str) -> tuple[Any, Any, Any, list[Callback]]:
    """Return a task, a module, an optimizer and callbacks, one of which cannot be saved."""
    return (
        OddTask() if name == "task" else Fit(),
        Extra(nn.Linear(3, 2)) if name == "model" else torch_net(),
        {"state": OddState, "param_groups": OddGroup}.get(name, torch.optim.Adam),
        [OddCallback()] if name == "callbacks" else [],
    )


NAMES = ["task", "model", "state", "param_groups", "callbacks"]


def train_until_refused(folder: str, name: str, use_fsdp: bool = False) -> str:
    """Return the error of training, in whose first step it is raised."""
    task, model, kind, callbacks = odd(name)
    optimizer = lambda p: kind(p, lr=0.1)  # noqa: E731
    parallel = ParallelConfig(use_fsdp, sharding_strategy="FULL_SHARD")  # type: ignore[arg-type]
    trainer: Any = ParallelMixin(settings(folder, parallel=parallel))
    with trainer, pytest.raises((TypeError, ValueError)) as caught:
        trainer.train(
            task,
            model,
            data(),
            epochs=3,
            batch_size=BATCH,
            optimizer=optimizer,
            callbacks=callbacks,
        )
    assert len(task.seen) == 1
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_refuses(tmp_path: Path, name: str) -> None:
    text = train_until_refused(str(tmp_path), name)
    assert f"{name}/" in text
    assert "odd is a set, which cannot be saved" in text
    assert not list((tmp_path / "checkpoints").glob("*-step-*"))


def train_ranks_until_refused(comm: Any, path: str, folder: str, name: str, use_fsdp: bool) -> str:
    with torch_group(comm, path):
        return train_until_refused(folder, name, use_fsdp)


@pytest.mark.parametrize(
    ("name", "use_fsdp"), [("model", True), ("state", True), ("state", False), ("callbacks", False)]
)
def test_all_ranks_refuse(shm: RankPool, tmp_path: Path, name: str, use_fsdp: bool) -> None:
    arguments = str(tmp_path / "f"), str(tmp_path / "run"), name, use_fsdp
    for text in shm.run(train_ranks_until_refused, *arguments, size=2, fresh=True):
        assert name in text
        assert "odd is a set, which cannot be saved" in text


def net(kind: str) -> Any:
    made: Any = torch_net()
    if "inner" in kind:
        made[0] = torch.compile(made[0], backend="eager")
    return torch.compile(made, backend="eager") if "outer" in kind else made


def epochs(folder: Path, kind: str, last: int, parallel: ParallelConfig, load: bool) -> float:
    model, task = net(kind), Fit()
    trainer: Any = ParallelMixin(settings(str(folder), parallel=parallel))
    with trainer:
        if load:
            trainer.load_checkpoint(task, model)
        adam = lambda p: torch.optim.Adam(p, lr=0.05)  # noqa: E731
        arguments: Any = {"batch_size": BATCH, "optimizer": adam}
        return float(trainer.train(task, model, data(), epochs=last, **arguments)[-1])


def resume_other_kinds(comm: Any, path: str, folder: Path, use_fsdp: bool) -> None:
    """Resume from each kind of module as each other one."""
    kinds = ["", "inner outer"]
    parallel = ParallelConfig(use_fsdp, sharding_strategy="FULL_SHARD")  # type: ignore[arg-type]
    with torch_group(comm, path):
        expected = epochs(folder / "whole", "", 2, parallel, False)
        for saved in kinds:
            epochs(folder / saved, saved, 1, parallel, False)
        for saved, loaded in itertools.product(kinds, kinds):
            copied = folder / f"{saved} to {loaded}"
            if comm.rank == 0:
                shutil.copytree(folder / saved, copied, symlinks=True)
            comm.barrier()
            assert epochs(copied, loaded, 2, parallel, True) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("use_fsdp", [False, True])
def test_compiled_modules_resume_on_ranks(shm: RankPool, tmp_path: Path, use_fsdp: bool) -> None:
    path = str(tmp_path / "f")
    shm.run(resume_other_kinds, path, tmp_path / "run", use_fsdp, size=2, limit=120)
