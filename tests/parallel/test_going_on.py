"""Training that goes on: by more data, from an earlier checkpoint, with other callbacks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from parallel.support import flat, torch_group
from parallel.test_mixin import BATCH, SAMPLES, SGD, Fit, data, settings, tagi_net, torch_net
from tagi_ddp import accelerate
from tagi_ddp.checkpoint import CheckpointError, Checkpoints
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.checkpoint.tree import Snapshot
from tagi_ddp.communicators import PeerLost
from tagi_ddp.parallel import (
    BestCheckpoint,
    Callback,
    CheckpointConfig,
    CSVLogger,
    ParallelMixin,
)


def trainer(folder: Path, every: int | None = None) -> ParallelMixin[Any, Any, Any]:
    return ParallelMixin(settings(str(folder), checkpoint=CheckpointConfig(every)))


def more_data() -> tuple[Any, Any]:
    x, y = data()
    return np.concatenate([x, x + 1]), np.concatenate([y, y + 1])


def test_every_epoch_has_all_of_its_data(tmp_path: Path) -> None:
    task, net = Fit(), tagi_net()
    with trainer(tmp_path) as made:
        made.train(task, net, data(), epochs=1, batch_size=BATCH)
        task.seen.clear()
        assert len(made.train(task, net, more_data(), epochs=3, batch_size=6)) == 2
    assert sorted(chain(*task.seen)) == sorted(more_data()[0][:, 0].tolist() * 2)


def test_an_epoch_that_has_begun_is_not_cut_otherwise(tmp_path: Path) -> None:
    with trainer(tmp_path, 1) as made:
        made.train(Fit(), tagi_net(), data(), epochs=1, batch_size=BATCH)
    task, net = Fit(), tagi_net()
    arguments: dict[str, Any] = {"data": data(), "epochs": 2, "batch_size": BATCH}
    with trainer(tmp_path) as made:
        state = made.load_checkpoint(task, net, tmp_path / "checkpoints" / "000002-step-2")
        assert (state.epoch, state.position) == (0, 2 * BATCH)
        for name, change in {
            "batch_size must be 8 until .* got 4": {"batch_size": 4},
            "length of data must be 21 until .* got 42": {"data": more_data()},
            "seed must be 0 until .* got 1": {"seed": 1},
        }.items():
            with pytest.raises(ValueError, match=name):
                made.train(task, net, **{**arguments, **change})
        assert made.train(task, net, **{**arguments, "epochs": 0, "batch_size": 4}) == []
        made.train(task, net, **arguments)
        assert len(list(chain(*task.seen))) == SAMPLES - 2 * BATCH + SAMPLES
        made.train(task, net, more_data(), epochs=3, batch_size=4, seed=1)  # at an epoch's end


def test_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    """Its entries lay in the file without those of a part."""
    folder, snapshot = Folder(tmp_path / "checkpoints"), Snapshot()
    snapshot.take({"task": {}, "run": {}, "state": {"epoch": 1, "position": 0}, "callbacks": {}})
    run = {"step": 3, "ranks": 1, "state": {"epoch": 1}}
    folder.write(folder.checkpoint(1, 3), 0, snapshot.write, run)
    with trainer(tmp_path) as made:
        with pytest.raises(ValueError, match=r"000001-step-3 is of an earlier version of the tr"):
            made.load_checkpoint(Fit(), tagi_net())
        made.train(Fit(), tagi_net(), data(), epochs=1, batch_size=BATCH)  # beside it
        assert made.load_checkpoint(Fit(), tagi_net()).num_steps == 3


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    with trainer(tmp_path) as made:
        made.train(Fit(), tagi_net(), data(), epochs=1, batch_size=BATCH)
        with pytest.raises(ValueError, match=r"model must be a TAGI network, .*, got a Sequential"):
            made.load_checkpoint(Fit(), torch_net())
    with trainer(tmp_path / "module") as made:
        made.train(Fit(), torch_net(), data(), epochs=1, batch_size=BATCH, optimizer=SGD)
        with pytest.raises(ValueError, match=r"model must be a torch module, .*, got a Sequential"):
            made.load_checkpoint(Fit(), tagi_net())
    with accelerate(tagi_net()) as model, Checkpoints(tmp_path / "other", model) as checkpoints:
        checkpoints.save(1)
    with pytest.raises(ValueError, match="000001-step-1 is of no trainer: it holds model"):
        made.load_checkpoint(Fit(), tagi_net(), tmp_path / "other" / "latest")


class WithSpare(nn.Sequential):
    """Has parameters that get no gradients."""

    def forward(self, x: Any) -> Any:
        return self[0](x)


def with_spare() -> nn.Module:
    torch.manual_seed(0)
    return WithSpare(nn.Linear(3, 2), nn.Linear(3, 2))


def with_gradients() -> nn.Module:
    net = torch_net()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return net


@pytest.mark.parametrize("kind", [SGD, torch.optim.Adam])
@pytest.mark.parametrize("make", [torch_net, with_gradients, with_spare])
def test_optimizers_go_on(make: Callable[[], nn.Module], kind: Any, tmp_path: Path) -> None:
    def train(folder: str, net: nn.Module, epochs: int, load: bool = False) -> nn.Module:
        arguments: Any = {"batch_size": BATCH, "optimizer": lambda p: kind(p, lr=0.05)}
        with trainer(tmp_path / folder) as made:
            if load:
                made.load_checkpoint(Fit(), net)
            made.train(Fit(), net, data(), epochs=epochs, **arguments)
        return net

    whole = train("whole", make(), 2)
    train("parts", make(), 1)
    parts = train("parts", make(), 2, load=True)
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))


def test_the_last_checkpoint_after_going_back(tmp_path: Path) -> None:
    """As many steps as before, but others; the best one's folder, too."""
    net, task = tagi_net(), Fit()
    arguments: Any = {"epochs": 2, "batch_size": BATCH}
    with trainer(tmp_path, 3) as made:
        made.train(task, net, data(), callbacks=[BestCheckpoint("loss")], **arguments)
        made.load_checkpoint(task, net, tmp_path / "checkpoints" / "000001-step-3")
        made.train(task, net, data(), callbacks=[BestCheckpoint("loss")], seed=1, **arguments)
        for folder in ("checkpoints", "best-loss"):
            other = tagi_net()
            state = made.load_checkpoint(Fit(), other, tmp_path / folder / "latest")
            assert state.epoch == 2
            assert np.array_equal(flat(other.state_dict()), flat(net.state_dict()))


class Count(Callback):
    """Counts epochs, also those before a restart."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def test_callbacks_go_on_beside_others(tmp_path: Path) -> None:
    arguments: Any = {"batch_size": BATCH}
    with trainer(tmp_path) as made:
        callbacks: list[Any] = [Count(), Count(10)]
        made.train(Fit(), tagi_net(), data(), epochs=2, callbacks=callbacks, **arguments)
    net, (first, second) = tagi_net(), (Count(), Count())
    with trainer(tmp_path) as made:
        made.load_checkpoint(Fit(), net)
        callbacks = [CSVLogger(), first, Callback(), second]
        made.train(Fit(), net, data(), epochs=3, callbacks=callbacks, **arguments)
    assert (first.count, second.count) == (3, 13)


class UpAndDown(Callback):
    """Metrics that are the least at different epochs."""

    def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
        metrics.update(up=-float(trainer.state.epoch == 1), down=-float(trainer.state.epoch == 2))


def test_the_best_of_several_metrics(tmp_path: Path) -> None:
    callbacks = [UpAndDown(), BestCheckpoint("up"), BestCheckpoint("down")]
    arguments: Any = {"epochs": 3, "batch_size": BATCH, "callbacks": callbacks}
    with trainer(tmp_path) as made:
        made.train(Fit(), tagi_net(), data(), **arguments)
        for epoch, metric in enumerate(("up", "down"), 1):
            path = tmp_path / f"best-{metric}" / "latest"
            assert made.load_checkpoint(Fit(), tagi_net(), path).epoch == epoch


def full_disk(comm: Any, path: str, folder: str) -> str:
    """Return the error of a rank when rank 0 cannot write its file."""

    def write(folder: Folder, checkpoint: Any, rank: int, *_: Any) -> None:
        if rank == 0:
            raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch, torch_group(comm, path):
        patch.setattr(Folder, "write", write)
        arguments: Any = {"epochs": 1, "batch_size": BATCH, "optimizer": SGD}
        failed = pytest.raises(CheckpointError, match="disk is full")
        with failed as caught, ParallelMixin(settings(folder)) as made:
            made.train(Fit(), torch_net(), data(), **arguments)
    return str(caught.value)


def test_all_ranks_wait_for_the_file_of_rank_0(shm: RankPool, tmp_path: Path) -> None:
    first, second = shm.run(full_disk, str(tmp_path / "f"), str(tmp_path / "run"), size=2)
    assert first.startswith("the disk is full. The folder is")
    assert second.startswith("rank 0: the disk is full. The folder is")


class Fails(Callback):
    """Raises an error on a rank, which the others do not know of."""

    def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.rank == 1:
            raise KeyError("a callback of rank 1")


def train_with_a_callback_that_fails(comm: Any, path: str, folder: str) -> str:
    with torch_group(comm, path, "gloo"), ParallelMixin(settings(folder)) as made:
        arguments: Any = {"epochs": 1, "batch_size": BATCH, "optimizer": SGD}
        with pytest.raises((KeyError, PeerLost)) as caught:
            made.train(Fit(), torch_net(), data(), callbacks=[Fails()], **arguments)
    return str(caught.value)


def test_a_rank_that_waits_to_save_learns_of_an_error(shm: RankPool, tmp_path: Path) -> None:
    arguments = (str(tmp_path / "f"), str(tmp_path / "run"))
    for text in shm.run(train_with_a_callback_that_fails, *arguments, size=2, fresh=True):
        assert "a callback of rank 1" in text


class Flat(Fit):
    """Its loss is always 1."""

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        return (output * 0 + 1).mean()


def test_the_loss_of_many_steps_in_16_bits(tmp_path: Path) -> None:
    """More than 256 steps, the sum of which bfloat16 does not hold."""
    many = tuple(np.concatenate([part] * 13) for part in data())
    net = torch_net().to(torch.bfloat16)
    with trainer(tmp_path) as made:
        losses = made.train(Flat(), net, many, epochs=1, batch_size=1, optimizer=SGD)
    assert losses == [1.0]
