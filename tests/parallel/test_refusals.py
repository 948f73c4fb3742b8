"""Arguments that the trainer refuses, and the errors that the other ranks get."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.rank_pool import RankPool

from parallel.support import launched, torch_group
from parallel.test_mixin import BATCH, SAMPLES, SGD, Fit, data, fit, settings, tagi_net, torch_net
from tagi_ddp.parallel import (
    BaseTrainer,
    BaseTrainerConfig,
    BestCheckpoint,
    EarlyStopping,
    ParallelConfig,
    ParallelMixin,
    TaskModel,
)
from tagi_ddp.parallel.batches import take


def short(comm: Any, path: str, folder: str) -> None:
    with torch_group(comm, path), ParallelMixin(settings(folder)) as trainer:
        arguments: Any = {"epochs": 1, "optimizer": SGD}
        for batch_size, left in ((10, 1), (20, 1), (1, 1)):
            text = f"batch_size {batch_size} leaves a batch of {left} of {SAMPLES} samples of data"
            with pytest.raises(ValueError, match=text):
                trainer.train(Fit(), torch_net(), data(), batch_size=batch_size, **arguments)


def test_ranks_without_samples_are_refused(shm: RankPool, tmp_path: Path) -> None:
    shm.run(short, str(tmp_path / "f"), str(tmp_path), size=2)


def train_a_task_that_fails(comm: Any, path: str, folder: str, use_fsdp: bool) -> str:
    task = Fit()
    task.fail_at = 1 if comm.rank == 1 else -1
    with torch_group(comm, path):
        try:
            fit(settings(folder, parallel=ParallelConfig(use_fsdp)), torch_net(), task)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("use_fsdp", [False, True])
def test_ranks_learn_why_one_has_failed(shm: RankPool, use_fsdp: bool, tmp_path: Path) -> None:
    told, failed = shm.run(
        train_a_task_that_fails, str(tmp_path / "f"), str(tmp_path / "run"), use_fsdp, size=2
    )
    assert failed == "OSError: the disk is gone"
    assert "gave up: OSError: the disk is gone" in told


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    with BaseTrainer[Any, Any, Any](settings(str(tmp_path))) as trainer:
        trainer.train(Fit(), torch_net(), data(), epochs=1, batch_size=8, optimizer=SGD)
        with pytest.raises(ValueError, match="data must have samples, got none"):
            trainer.evaluate(tuple(array[:0] for array in data()), batch_size=8)
        with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
            trainer.evaluate(data(), batch_size=0)


def test_settings_of_a_mapping(tmp_path: Path) -> None:
    """The mixin's are nested; a trainer of one process has no "parallel"."""
    given = {"name": "run", "exp_dir": str(tmp_path), "parallel": {"use_fsdp": True}}
    trainer: Any = ParallelMixin(given)
    assert trainer.config == settings(str(tmp_path), parallel=ParallelConfig(True))
    assert trainer.train(Fit(), torch_net(), data(), epochs=1, batch_size=8, optimizer=SGD)
    with pytest.raises(ValueError, match=r"config\.parallel is no setting; there are name, exp_na"):
        BaseTrainer(given)
    with pytest.raises(ValueError, match=r"config\.parallel\.use_fdsp is no setting"):
        ParallelMixin({**given, "parallel": {"use_fdsp": True}})
    with pytest.raises(ValueError, match="name must be given"):
        ParallelMixin(None)
    for wrong in (3, "run", BaseTrainerConfig("run", exp_dir=str(tmp_path))):
        with pytest.raises(TypeError, match="config must be a TrainerParallelConfig, a mapping or"):
            ParallelMixin(wrong)  # type: ignore[arg-type]


def wrong_optimizers(comm: Any, path: str, folder: str) -> None:
    """Refuse what is no factory while torch's default group goes on being usable."""
    model, other = torch_net(), torch_net()
    arguments: Any = {"epochs": 1, "batch_size": BATCH}
    none = tuple(array[:0] for array in data())

    def others(_: Any) -> SGD:
        return SGD(other.parameters())

    with torch_group(comm, path), ParallelMixin(settings(folder)) as trainer:
        with pytest.raises(TypeError, match=r"optimizer must be a function .* like partial\(SGD,"):
            trainer.train(Fit(), model, data(), optimizer=SGD(model.parameters()), **arguments)
        with pytest.raises(TypeError, match=r"optimizer must be a function .*, got 0.1"):
            trainer.train(Fit(), model, data(), optimizer=0.1, **arguments)
        with pytest.raises(ValueError, match="data must have samples, got none"):
            trainer.train(Fit(), model, none, optimizer=SGD, **arguments)
        with pytest.raises(TypeError, match=r"data must be arrays .* got a NoneType"):
            trainer.train(Fit(), model, None, optimizer=SGD, **arguments)
        given = None if comm.rank == 1 else data()  # one rank alone is wrong
        with pytest.raises(TypeError, match="data must be arrays of one length"):
            trainer.train(Fit(), model, given, optimizer=SGD, **arguments)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == comm.size
        with pytest.raises(ValueError, match=r"optimizer must hold only .* but 4 of its 4 are"):
            trainer.train(Fit(), model, data(), optimizer=others, **arguments)


def test_optimizers_that_are_refused(shm: RankPool, tmp_path: Path) -> None:
    shm.run(wrong_optimizers, str(tmp_path / "f"), str(tmp_path), size=2, limit=10)


def test_what_an_optimizer_must_be(tmp_path: Path) -> None:
    arguments: Any = {"epochs": 1, "batch_size": BATCH}
    made: Any = SGD(torch_net().parameters())
    with ParallelMixin(settings(str(tmp_path))) as trainer:
        with pytest.raises(TypeError, match=r"optimizer must return a .*Optimizer, got a list"):
            trainer.train(Fit(), torch_net(), data(), optimizer=list, **arguments)
        with pytest.raises(TypeError, match=r"optimizer must be None .*, got an optimizer, SGD$"):
            trainer.train(Fit(), tagi_net(), data(), optimizer=made, **arguments)
        with pytest.raises(ValueError, match="data must have samples, got none"):
            trainer.train(Fit(), tagi_net(), tuple(a[:0] for a in data()), **arguments)


def test_what_is_refused(tmp_path: Path) -> None:
    with ParallelMixin(settings(str(tmp_path), use_double_weight_precision=True)) as trainer:
        arguments: Any = {"epochs": 1, "batch_size": BATCH}
        with pytest.raises(ValueError, match="use_double_weight_precision must be False for a py"):
            trainer.train(Fit(), tagi_net(), data(), **arguments)
        with pytest.raises(TypeError, match="optimizer must be a function of the parameters for"):
            trainer.train(Fit(), torch_net(), data(), **arguments)
        with pytest.raises(TypeError, match="optimizer must be None for this model"):
            trainer.train(Fit(), tagi_net(), data(), optimizer=SGD, **arguments)
        with pytest.raises(ValueError, match=r"data must hold arrays of one length, got .*21, 20"):
            trainer.train(Fit(), tagi_net(), (data()[0], data()[1][1:]), **arguments)
        assert trainer.task_model is None
        assert isinstance(BaseTrainer._get_task_model(trainer, Fit(), torch_net()), TaskModel)


def test_what_would_fail_after_an_epoch(tmp_path: Path) -> None:
    """Held-out data that are none, or are missing, are named before anything is done."""
    x, y = data()
    wrong: dict[str, dict[str, Any]] = {
        "held_out must hold arrays of one length, got lengths": {"held_out": (x, y[:3])},
        "held_out must have samples, got none": {"held_out": (x[:0], y[:0])},
        "held_out must be given, as EarlyStopping needs": {"callbacks": [EarlyStopping()]},
        "held_out must be given, as BestCheckpoint needs": {"callbacks": [BestCheckpoint()]},
    }
    task = Fit()
    with BaseTrainer[Any, Any, Any](settings(str(tmp_path))) as trainer:
        for text, more in wrong.items():
            with pytest.raises(ValueError, match=text):
                trainer.train(task, tagi_net(), (x, y), epochs=1, batch_size=BATCH, **more)
    assert task.seen == []


def test_lists_are_no_arrays(tmp_path: Path) -> None:
    x, y = data()
    wrong: dict[str, Any] = {
        "data must be arrays .* got a tuple of lists: make arrays": (x.tolist(), y.tolist()),
        "data must be arrays .* got a list of tuples: .* a torch Dataset": list(
            zip(x, y, strict=True)
        ),
    }
    with BaseTrainer[Any, Any, Any](settings(str(tmp_path))) as trainer:
        for text, given in wrong.items():
            with pytest.raises(TypeError, match=text):
                trainer.train(Fit(), tagi_net(), given, epochs=1, batch_size=BATCH)


def test_a_share_without_samples() -> None:
    """It looks like the others, whatever a dataset's samples are made of."""

    class Named(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return {"x": np.ones(2, np.float32), "pair": (1.5, index)}

    batch = take(Named(), np.zeros(0, np.int64), torch.nn.Module())
    assert batch["x"].shape == (0, 2)
    assert [part.shape for part in batch["pair"]] == [(0,), (0,)]


def wrong_on_one(comm: Any, job: str, folder: str) -> str:
    """Return the error of a rank when one is wrong, before torch has a group."""
    with launched(comm.rank, comm.size, job), ParallelMixin(settings(folder)) as trainer:
        arguments: Any = {"epochs": 1, "optimizer": SGD, "batch_size": -comm.rank or BATCH}
        try:
            with pytest.raises(ValueError, match="batch_size must be at least 1, got -1") as caught:
                trainer.train(Fit(), torch_net(), data(), **arguments)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return str(caught.value)


def test_ranks_do_not_wait_for_one_that_is_wrong(shm: RankPool, tmp_path: Path) -> None:
    first, second = shm.run(wrong_on_one, secrets.token_hex(4), str(tmp_path), size=2, limit=20)
    assert first == f"rank 1: {second}"
