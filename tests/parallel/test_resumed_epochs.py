"""A run that goes on within an epoch tells the losses, and ends with the bits, of a whole one."""

from __future__ import annotations

import secrets
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from parallel.support import launched, torch_group
from parallel.test_mixin import BATCH, SAMPLES, Fit, WithScale, data, settings, tagi_net, torch_net
from tagi_ddp.checkpoint import read_tree
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.parallel import (
    BaseTrainer,
    CheckpointConfig,
    CSVLogger,
    EarlyStopping,
    ParallelConfig,
    ParallelMixin,
)

EPOCHS, PER_EPOCH = 3, -(-SAMPLES // BATCH)
ADAM = partial(torch.optim.Adam, lr=0.05)


def noisy_net() -> nn.Module:
    """Return a module that draws random numbers and has running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))


class WithoutState(nn.Module, Fit):
    """A task that is a module without a parameter."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        Fit.__init__(self)


def run(kind: str, folder: Path, path: Path | None = None, every: int | None = 1) -> Any:
    """Train, from a checkpoint on if there is a path; return losses, rows and parameters."""
    is_module = kind != "tagi"
    config = settings(
        str(folder),
        checkpoint=CheckpointConfig(every),
        parallel=ParallelConfig(use_fsdp="fsdp" in kind),
        use_double_weight_precision="double" in kind,
    )
    net, task = (noisy_net(), WithScale()) if is_module else (tagi_net(), Fit())
    if kind == "plain":
        net = torch_net()
    with ParallelMixin(config) as trainer:
        torch.manual_seed(7 + trainer.rank)  # where dropout begins
        if path is not None:
            trainer.load_checkpoint(task, net, path)
            torch.manual_seed(99)  # of which nothing is left then
        losses = trainer.train(
            task,
            net,
            data(),
            epochs=EPOCHS,
            batch_size=BATCH,
            optimizer=ADAM if is_module else None,
            held_out=data(),
            callbacks=[EarlyStopping(99, metric="loss"), CSVLogger()],
        )
        rank = trainer.rank
    rows = (folder / "logs/run.csv").read_text().splitlines()[1:] if rank == 0 else []
    end = Folder(folder / "checkpoints").whole()[-1].file_of(0)
    tree = read_tree(end, "parts", "trainer")
    return losses, rows, {**tree["model"], **tree["task"], **tree["parameters"]}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert np.asarray(value).tobytes() == np.asarray(other[name]).tobytes(), name


def from_each_step(comm: Any, kind: str, job: str, folder: Path) -> int:
    alone = comm.size == 1
    module = kind != "tagi"
    group = torch_group(comm, f"{folder}.group") if module and not alone else nullcontext()
    with launched(comm.rank, comm.size, job), group:
        losses, rows, parameters = run(kind, folder / "whole")
        assert len(losses) == EPOCHS
        found = Folder(folder / "whole" / "checkpoints").whole()
        for each in found[:-1]:
            epoch = each.step // PER_EPOCH
            resumed = run(kind, folder / str(each.step), each.path, every=None)
            assert resumed[0] == losses[epoch:], each.step
            assert resumed[1] == rows[epoch:], each.step
            assert_equal(resumed[2], parameters)
    return len(found)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param("double", 1, marks=pytest.mark.slow),
        ("tagi", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("double ddp", 2, marks=pytest.mark.slow),
        ("double fsdp", 2),
        ("tagi", 2),
    ],
)
def test_losses_of_a_resumed_epoch(shm: RankPool, tmp_path: Path, kind: str, size: int) -> None:
    job = secrets.token_hex(4)
    found = shm.run(from_each_step, kind, job, tmp_path / kind, size=size, limit=60)
    assert found == [EPOCHS * PER_EPOCH] * size


def on_other_ranks(comm: Any, kind: str, job: str, folder: Path, step: int | None) -> list[float]:
    path = None if step is None else folder / "2" / "checkpoints" / f"{step:06}-step-{step}"
    group = torch_group(comm, f"{folder}.{job}") if comm.size > 1 else nullcontext()
    with launched(comm.rank, comm.size, job), group:
        return run(kind, folder / str(comm.size), path)[0]


@pytest.mark.parametrize("kind", ["tagi", "plain"])
def test_losses_on_another_number_of_ranks(shm: RankPool, tmp_path: Path, kind: str) -> None:
    """Other ranks take over what was added up before."""
    job = secrets.token_hex(4)
    whole = shm.run(on_other_ranks, kind, job, tmp_path, None, size=2)[0]
    for size in (1, 3):
        for step in (1, 2):
            found = shm.run(on_other_ranks, kind, f"{job}{size}{step}", tmp_path, step, size=size)
            np.testing.assert_allclose(found, [whole] * size, rtol=1e-3)


def test_what_one_trainer_saved_the_other_goes_on_from(tmp_path: Path) -> None:
    """A Sequential in one process is wrapped by the mixin, and not by BaseTrainer.

    The engine alone cannot begin with a batch that is smaller than a later one.
    """
    arguments: Any = {"epochs": EPOCHS, "batch_size": BATCH}
    found = []
    for first, then in ((BaseTrainer, ParallelMixin), (ParallelMixin, BaseTrainer)):
        folder = str(tmp_path / first.__name__)
        config = settings(folder, checkpoint=CheckpointConfig(1))
        with first(config) as trainer:
            losses = trainer.train(Fit(), tagi_net(), data(), **arguments)
        task, net = Fit(), tagi_net()
        with then(config) as trainer:
            path = Path(folder) / "checkpoints" / "000001-step-1"
            trainer.load_checkpoint(task, net, path)
            found.append((trainer.train(task, net, data(), **arguments), losses))
    for resumed, whole in found:
        np.testing.assert_allclose(resumed, whole, rtol=1e-3)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), (True, True)])
def test_compiled_modules(tmp_path: Path, saved: bool, loaded: bool, part: bool) -> None:
    """A checkpoint is the same whether torch compiles the module, a part of it, or nothing."""

    def made(compiled: bool) -> nn.Module:
        net = noisy_net()
        if compiled and part:
            net[0] = torch.compile(net[0], backend="eager")
        elif compiled:
            return torch.compile(net, backend="eager")
        return net

    arguments: Any = {"batch_size": BATCH, "optimizer": ADAM}
    with ParallelMixin(settings(str(tmp_path / "whole"))) as trainer:
        torch.manual_seed(3)
        whole = trainer.train(WithoutState(), made(False), data(), epochs=2, **arguments)
    with ParallelMixin(settings(str(tmp_path / "parts"))) as trainer:
        torch.manual_seed(3)
        trainer.train(WithoutState(), made(saved), data(), epochs=1, **arguments)
    task, net = WithoutState(), made(loaded)
    with ParallelMixin(settings(str(tmp_path / "parts"))) as trainer:
        trainer.load_checkpoint(task, net)
        assert trainer.train(task, net, data(), epochs=2, **arguments) == whole[1:]


# --- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_is_rounded(tmp_path: Path, saved: torch.dtype, given: torch.dtype) -> None:
    """A module of a narrower dtype gets the wider one, with the same parameters and buffers."""

    class InItsDtype(Fit):
        def run_model(self, model: Any, batch: Any, state: Any) -> Any:
            return model(batch[0])

    net, loaded = noisy_net().to(saved), noisy_net().to(given)
    tied = loaded[0].weight
    arguments: Any = {"epochs": 1, "batch_size": BATCH, "optimizer": ADAM}
    with ParallelMixin(settings(str(tmp_path))) as trainer:
        trainer.train(InItsDtype(), net, data(), **arguments)
        trainer.load_checkpoint(InItsDtype(), loaded)
    wide = torch.promote_types(saved, given)
    assert loaded[0].weight is tied
    for (name, value), own in zip(
        net.state_dict().items(), loaded.state_dict().values(), strict=True
    ):
        assert own.dtype == (wide if value.is_floating_point() else value.dtype), name
        assert torch.equal(own, value.to(own.dtype)), name


# --- who removes -----------------------------------------------------------------------------


def removed_by(comm: Any, path: str, folder: str, use_fsdp: bool) -> tuple[int, int]:
    """Return how often this rank has removed checkpoints of two runs in a row, and read one."""
    pruned: list[int] = []
    prune = Folder.prune

    def counted(self: Folder, keep: int) -> None:
        pruned.append(keep)
        prune(self, keep)

    checkpoint = CheckpointConfig(1, True)
    config = settings(folder, checkpoint=checkpoint, parallel=ParallelConfig(use_fsdp))
    net, task = noisy_net(), Fit()
    with pytest.MonkeyPatch.context() as patch, torch_group(comm, path):
        patch.setattr(Folder, "prune", counted)
        with ParallelMixin(config) as trainer:
            for epochs in (1, 2):
                trainer.train(task, net, data(), epochs=epochs, batch_size=BATCH, optimizer=ADAM)
        return len(pruned), BaseTrainer(config).load_checkpoint(Fit(), noisy_net()).epoch


@pytest.mark.parametrize("use_fsdp", [False, True])
def test_rank_0_alone_removes_checkpoints(shm: RankPool, tmp_path: Path, use_fsdp: bool) -> None:
    arguments = (str(tmp_path / "group"), str(tmp_path / "run"), use_fsdp)
    (first, epoch), (second, same) = shm.run(removed_by, *arguments, size=2)
    assert (first > 0, second) == (True, 0)
    assert epoch == same == 2
    folder = tmp_path / "run" / "checkpoints"
    (only,) = folder.glob("*-step-*")
    assert (folder / "latest").resolve() == only


def resumed_by_one(comm: Any, path: str, folder: str) -> str:
    config = settings(folder)
    net, task = noisy_net(), Fit()
    arguments: Any = {"batch_size": BATCH, "optimizer": ADAM}
    with torch_group(comm, path), ParallelMixin(config) as trainer:
        trainer.train(task, net, data(), epochs=1, **arguments)
        if comm.rank == 1:
            trainer.load_checkpoint(task, net)
        with pytest.raises(ValueError, match="differ first at checkpoint of rank 1") as caught:
            trainer.train(task, net, data(), epochs=2, **arguments)
    return str(caught.value)


def test_a_checkpoint_that_one_rank_has_loaded(shm: RankPool, tmp_path: Path) -> None:
    for text in shm.run(resumed_by_one, str(tmp_path / "g"), str(tmp_path / "run"), size=2):
        assert "checkpoint of rank 1: 000001-step-3; rank 0 has checkpoint: none" in text
