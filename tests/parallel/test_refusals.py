"""What the trainer refuses, and how other ranks learn of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import RankPool

from parallel.support import torch_group
from parallel.test_mixin import BATCH, SAMPLES, SGD, Fit, data, fit, settings, tagi_net, torch_net
from tagi_ddp.parallel import (
    BaseTrainer,
    BaseTrainerConfig,
    ParallelConfig,
    ParallelMixin,
    TaskModel,
)


def short(comm: Any, path: str, folder: str) -> None:
    with torch_group(comm, path), ParallelMixin(settings(folder)) as trainer:
        arguments: Any = {"epochs": 1, "optimizer": SGD}
        for batch_size, left in ((10, 1), (20, 1), (1, 1)):
            text = f"batch_size {batch_size} leaves a batch of {left} of {SAMPLES} samples for 2"
            with pytest.raises(ValueError, match=text):
                trainer.train(Fit(), torch_net(), data(), batch_size=batch_size, **arguments)


def test_ranks_without_samples_are_refused(shm: RankPool, tmp_path: Path) -> None:
    shm.run(short, str(tmp_path / "f"), str(tmp_path), size=2)


def fail(comm: Any, path: str, folder: str, use_fsdp: bool) -> str:
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
    told, failed = shm.run(fail, str(tmp_path / "f"), str(tmp_path / "run"), use_fsdp, size=2)
    assert failed == "OSError: the disk is gone"
    assert "gave up: OSError: the disk is gone" in told


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    with BaseTrainer[Any, Any, Any](settings(str(tmp_path))) as trainer:
        trainer.train(Fit(), torch_net(), data(), epochs=1, batch_size=8, optimizer=SGD)
        with pytest.raises(ValueError, match="data must have samples to evaluate, got none"):
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
        with pytest.raises(ValueError, match="data must have samples to train on, got none"):
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
        with pytest.raises(ValueError, match="data must have samples to train on, got none"):
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
