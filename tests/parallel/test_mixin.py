"""The trainer: the same task, of torch or of pytagi, in one process or in several."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytagi
import pytest
import torch
from pytagi.nn import BatchNorm2d, Linear, ReLU, Sequential
from support.rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from parallel.support import flat, launched, torch_group
from tagi_ddp import DDPSequential
from tagi_ddp.checkpoint import CheckpointError, read_tree
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.parallel import (
    BaseTrainer,
    BaseTrainerConfig,
    CheckpointConfig,
    GaussianLoss,
    ParallelConfig,
    ParallelMixin,
    State,
    Task,
    TrainerParallelConfig,
)
from tagi_ddp.replica.host import attach
from tagi_ddp.sequential.run_state import named_parameters

SAMPLES, BATCH = 21, 8  # batches of 8, 8 and 5: shares differ
SGD = torch.optim.SGD


class Fit(Task):
    """Of torch or of pytagi; keeps the inputs that it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.dtypes: set[Any] = set()
        self.fail_at = -1

    def on_before_forward_step(self, model: Any, batch: Any, state: Any) -> None:
        self.seen.append(batch[0][:, 0].tolist())
        self.dtypes |= {part.dtype for part in batch}
        if state.num_steps == self.fail_at:
            raise OSError("the disk is gone")

    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        return model(batch[0])

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        if isinstance(model, nn.Module):
            return (output - batch[1]).square().mean()
        return GaussianLoss(model, output, batch[1], 0.1)


class WithScale(nn.Module, Fit):
    """A task that has a parameter."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        Fit.__init__(self)
        self.scale = nn.Parameter(torch.ones(1))

    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        return model(batch[0]) * self.scale


def data() -> tuple[Any, Any]:
    x = np.random.default_rng(1).normal(size=(SAMPLES, 3)).astype(np.float32)
    return x, np.stack([x.sum(1), np.sin(x[:, 0])], 1)


def torch_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def tagi_net(norm: bool = False) -> Any:
    pytagi.manual_seed(0)
    hidden = [BatchNorm2d(6)] if norm else []
    return Sequential(Linear(3, 6), *hidden, ReLU(), Linear(6, 2))


def settings(folder: str, **more: Any) -> TrainerParallelConfig:
    return TrainerParallelConfig("run", exp_dir=folder, **more)


def fit(config: Any, model: Any, task: Any = None, **more: Any) -> tuple[Any, Any, Any]:
    """Train; return what is to be compared: losses, the evaluation, what the task saw."""
    optimizer = (lambda p: SGD(p, 0.1)) if isinstance(model, nn.Module) else None
    task = task or Fit()
    arguments = {"epochs": 2, "batch_size": BATCH, "optimizer": optimizer, **more}
    with ParallelMixin(config) as trainer:
        losses = trainer.train(task, model, data(), **arguments)
        seen = task.seen[:]
        return losses, trainer.evaluate(data(), batch_size=BATCH), seen


def loaded(folder: str, model: Any, task: Any = None) -> Any:
    """Return the state of a plain model that has read the last checkpoint."""
    trainer: BaseTrainer[Any, Any, Any] = BaseTrainer(settings(folder))
    trainer.load_checkpoint(task or Fit(), model)
    return flat(
        {
            name: map(np.ravel, [*v] if isinstance(v, tuple) else [v])
            for name, v in model.state_dict().items()
        }
    )


def train_by_mixin(comm: Any, job: str, folder: str, kind: str) -> Any:
    """Train by one wrapper, in torch's group or by the launcher's variables."""
    if kind == "tagi":
        with launched(comm.rank, comm.size, job):
            parallel = ParallelConfig(use_fsdp=True)
            return fit(settings(folder, parallel=parallel), tagi_net())
    with torch_group(comm, f"{folder}.{kind}"):
        parallel = ParallelConfig(use_fsdp=kind == "fsdp")
        config = settings(folder, parallel=parallel, use_double_weight_precision=True)
        return fit(config, torch_net(), WithScale())


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tagi"])
def test_ranks_train_as_one_process(shm: RankPool, kind: str, tmp_path: Path) -> None:
    """Every rank has its share of the same batches, and the result is that of all samples."""
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    make: Callable[[], Any] = tagi_net if kind == "tagi" else torch_net
    task = Fit() if kind == "tagi" else WithScale()
    double = kind != "tagi"
    losses, evaluation, seen = fit(settings(one, use_double_weight_precision=double), make(), task)
    assert losses[0] > losses[1]
    rtol = 1e-9 if double else 2e-4
    answers = shm.run(train_by_mixin, secrets.token_hex(4), many, kind, size=2, limit=60)
    for found, evaluated, _ in answers:
        np.testing.assert_allclose(found, losses, rtol=rtol)
        np.testing.assert_allclose(evaluated, evaluation, rtol=rtol)
    steps = zip(*(ranks for *_, ranks in answers), strict=True)
    assert [first + second for first, second in steps] == seen
    first, second = (list(chain(*epoch)) for epoch in (seen[:3], seen[3:6]))
    assert sorted(first) == sorted(second) == sorted(data()[0][:, 0].tolist())
    assert first != second
    np.testing.assert_allclose(
        loaded(many, make().double() if double else make()),
        loaded(one, make().double() if double else make()),
        rtol=rtol,
        atol=1e-9 if double else 1e-5,
    )
    lines = (Path(many) / "logs/run.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == answers[0][0]
    assert json.loads(lines[-1])["num_samples"] == 2 * SAMPLES


def kinds(comm: Any, path: str, folder: str) -> list[str]:
    found = []
    with torch_group(comm, path):
        for use_fsdp in (False, True):
            config = settings(folder, parallel=ParallelConfig(use_fsdp))
            with ParallelMixin(config) as trainer:
                for model, more in ((torch_net(), SGD), (tagi_net(), None)):
                    arguments: Any = {"batch_size": BATCH, "optimizer": more}
                    trainer.train(Fit(), model, data(), epochs=0, **arguments)
                    kept = trainer.task_model
                    found.append(type(kept).__name__)
                    found.append(type(getattr(kept, "model", None)).__name__)
                    assert (trainer.rank, trainer.world_size) == (comm.rank, comm.size)
    return found


def test_what_the_mixin_makes(shm: RankPool, tmp_path: Path) -> None:
    found = shm.run(kinds, str(tmp_path / "f"), str(tmp_path), size=2)[0]
    expected = [DistributedDataParallel.__name__, "NoneType", "TaskModel", "DDPSequential"]
    expected += [FullyShardedDataParallel.__name__, "Sequential", "TaskModel", "DDPSequential"]
    assert found == expected


def everything(net: Any) -> Any:
    named = named_parameters(attach(net))
    assert sum(name.endswith("mu_ra") for name in named) == 1
    return np.concatenate([np.ravel(array) for array in named.values()])


def stop_and_go(comm: Any, job: str, folder: str, every: int) -> Any:
    """Fail in the second epoch; go on from the checkpoint that was written last."""
    with launched(comm.rank, comm.size, job):
        whole, task = tagi_net(norm=True), Fit()
        fit(settings(folder + ".whole"), whole, task)
        seen = task.seen[:]
        config = settings(folder, checkpoint=CheckpointConfig(every, True))
        task.fail_at = 5
        with pytest.raises(OSError, match="disk is gone"):
            fit(config, tagi_net(norm=True), task)
        comm.barrier()  # each rank has written its file
        net, task = tagi_net(norm=True), Fit()
        arguments: Any = {"epochs": 2, "batch_size": BATCH}
        with ParallelMixin(config) as trainer:
            state = trainer.load_checkpoint(task, net)
            order = {"length of data": SAMPLES, "batch_size": BATCH, "seed": 0}
            assert state == State(
                1, *{2: (4, SAMPLES + BATCH, BATCH, order), 3: (3, SAMPLES)}[every]
            )
            seen = seen[state.num_steps : 6]
            assert len(trainer.train(task, net, data(), **arguments)) == 1
            assert trainer.train(task, net, data(), **arguments) == []
        assert task.seen == seen
        assert np.array_equal(everything(net), everything(whole))
        read = tagi_net(norm=True)
        loaded(folder, read)
        assert np.array_equal(everything(read), everything(whole))
        return everything(net)


@pytest.mark.parametrize("every", [2, 3])
def test_training_goes_on_where_it_stopped(shm: RankPool, tmp_path: Path, every: int) -> None:
    """In the midst of an epoch, or at its end; a network with running statistics."""
    folder = str(tmp_path / "stopped")
    state, other = shm.run(stop_and_go, secrets.token_hex(4), folder, every, size=2)
    assert np.array_equal(state, other)
    lock, last, link = sorted(path.name for path in (tmp_path / "stopped/checkpoints").iterdir())
    assert (lock, link) == (".lock", "latest")
    assert last.endswith("-step-6")
    latest = tmp_path / "stopped/checkpoints/latest"
    assert latest.resolve().name == last
    names = sorted(path.name for path in latest.iterdir())
    assert names == ["rank-0.safetensors", "rank-1.safetensors", "run.json"]


def with_adam(comm: Any, path: str, folder: str, use_fsdp: bool) -> bool:
    """Return whether a run in two parts leaves the same as a run in one."""
    with torch_group(comm, path):
        parallel = ParallelConfig(use_fsdp=use_fsdp)
        whole, parts = (settings(f"{folder}/{name}", parallel=parallel) for name in "ab")
        arguments: Any = {"optimizer": partial(torch.optim.Adam, lr=0.05), "batch_size": BATCH}
        fit(whole, torch_net(), WithScale(), **arguments)
        fit(parts, torch_net(), WithScale(), **arguments, epochs=1)
        net, task = torch_net(), WithScale()
        net(torch.ones(2, 3)).sum().backward()  # gradients that are there already do not matter
        with ParallelMixin(parts) as trainer:
            assert trainer.load_checkpoint(task, net).epoch == 1
            trainer.train(task, net, data(), epochs=2, **arguments)
        comm.barrier()
        found = [loaded(f"{folder}/{name}", torch_net(), WithScale()) for name in "ab"]
        return np.array_equal(*found)


@pytest.mark.parametrize("use_fsdp", [False, True])
def test_the_optimizer_goes_on_too(shm: RankPool, use_fsdp: bool, tmp_path: Path) -> None:
    assert all(shm.run(with_adam, str(tmp_path / "g"), str(tmp_path), use_fsdp, size=2, limit=60))


@pytest.mark.parametrize(
    ("every", "recent", "files"),
    [
        (None, False, ["000001-step-6"]),
        (2, False, ["000001-step-2", "000002-step-4", "000003-step-6"]),
        (4, True, ["000002-step-6"]),
    ],
)
def test_files(every: int | None, recent: bool, files: list[str], tmp_path: Path) -> None:
    model, task = torch_net(), WithScale()
    config = settings(str(tmp_path), checkpoint=CheckpointConfig(every, recent))
    fit(config, model, task)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".lock", *files, "latest"]
    parts = read_tree(folder / "latest" / "rank-0.safetensors", "parts", "trainer")
    assert parts["state"] == asdict(State(2, 6, 2 * SAMPLES))
    plain, other = torch_net(), WithScale()
    plain.load_state_dict(parts["model"], strict=True)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    loaded(str(tmp_path), plain, other)
    assert torch.equal(other.scale, task.scale)
    assert not torch.equal(task.scale, torch.ones(1))


def test_files_are_written_while_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    goes_on, write = threading.Event(), Folder.write

    def slowly(folder: Folder, checkpoint: Any, *rest: Any) -> None:
        if checkpoint.step == 6:
            raise OSError("the disk is full")
        assert goes_on.wait(5)
        write(folder, checkpoint, *rest)

    class Goes(Fit):
        def on_before_forward_step(self, model: Any, batch: Any, state: Any) -> None:
            if state.num_steps == 5:
                goes_on.set()

    monkeypatch.setattr(Folder, "write", slowly)
    with pytest.raises(CheckpointError, match="the disk is full"):
        fit(settings(str(tmp_path), checkpoint=CheckpointConfig(4)), tagi_net(), Goes())
    path = tmp_path / "checkpoints" / "latest" / "rank-0.safetensors"
    assert read_tree(path, "parts", "trainer", "state", "num_steps") == 4


def test_one_process_without_the_mixin(tmp_path: Path) -> None:
    """BaseTrainer trains a network as the mixin does; datasets are collated."""
    arguments: Any = {"epochs": 1, "batch_size": BATCH}
    with BaseTrainer(BaseTrainerConfig("a", exp_dir=str(tmp_path))) as base:
        plain = base.train(Fit(), tagi_net(), data(), **arguments)
        assert not isinstance(base.task_model.model, DDPSequential)
        with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*other"):
            base.load_checkpoint(Fit(), tagi_net(), tmp_path / "other")
    with pytest.raises(RuntimeError, match=r"evaluate\(\) needs a train\(\)"):
        base.evaluate(data(), batch_size=BATCH)
    accelerated, _, _ = fit(settings(str(tmp_path)), tagi_net(), epochs=1)
    np.testing.assert_allclose(accelerated, plain, rtol=1e-4)

    collated = []
    dataset = TensorDataset(*map(torch.as_tensor, data()))
    for given in (data(), dataset):
        with ParallelMixin(settings(str(tmp_path))) as trainer:
            optimizer: Any = lambda p: SGD(p, 0.1)  # noqa: E731
            collated += trainer.train(Fit(), torch_net(), given, optimizer=optimizer, **arguments)
    assert collated[0] == collated[1]


@pytest.mark.parametrize("double", [False, True])
def test_the_dtype_of_batches(double: bool, tmp_path: Path) -> None:
    task = Fit()
    fit(settings(str(tmp_path), use_double_weight_precision=double), torch_net(), task)
    assert task.dtypes == {torch.float64 if double else torch.float32}
