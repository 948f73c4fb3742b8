"""The trainer's report of each epoch, and the callbacks that take it."""

from __future__ import annotations

import csv
import json
import math
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytagi
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential
from support.rank_pool import RankPool
from torch import nn

from parallel.support import launched
from tagi_ddp import DDPConfig, DDPSequential
from tagi_ddp.parallel import (
    BaseTrainer,
    BestCheckpoint,
    Callback,
    CheckpointConfig,
    CSVLogger,
    EarlyStopping,
    GaussianLoss,
    ParallelMixin,
    PosteriorStatistics,
    Task,
    TensorBoardLogger,
    TrainerParallelConfig,
)

SAMPLES, BATCH, NOISE = 40, 8, 1.0


class Fit(Task):
    noise = NOISE

    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        return model(batch[0])

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        if isinstance(model, nn.Module):
            return (output - batch[1]).square().mean()
        return GaussianLoss(model, output, batch[1], self.noise)


def data(seed: int = 0) -> tuple[Any, Any]:
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(SAMPLES, 3)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True)) + 0.3 * dice.normal(size=(SAMPLES, 1))
    return x, y.astype(np.float32)


def network() -> Any:
    pytagi.manual_seed(0)
    return Sequential(Linear(3, 16), ReLU(), Linear(16, 1))


def trainer(folder: Path, **more: Any) -> ParallelMixin[Any, Any, Any]:
    return ParallelMixin(TrainerParallelConfig("run", exp_dir=str(folder), **more))


def train_with_callbacks(
    folder: Path, epochs: int, callbacks: Any, model: Any = None, **more: Any
) -> list[float]:
    with trainer(folder, **more) as made:
        return made.train(
            Fit(),
            network() if model is None else model,
            data(),
            epochs=epochs,
            batch_size=BATCH,
            held_out=data(1),
            callbacks=callbacks,
        )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs/run.jsonl").read_text().splitlines()]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 4), st.integers(0, 2))
def test_early_stopping(losses: list[int], patience: int, delta: int) -> None:
    """After so many epochs in turn that were no better, by delta, than the best before them."""
    stopping, run = EarlyStopping(patience, delta, "loss"), SimpleNamespace(should_stop=False)
    seen: list[int] = []
    best, bests = math.inf, []
    for loss in losses:
        seen.append(loss)
        bests.append(loss < best - delta)
        best = loss if bests[-1] else best
        again = EarlyStopping(patience, delta, "loss")
        again.load_state_dict(stopping.state_dict())  # as after a restart
        stopping = again
        stopping.on_epoch_end(run, {"loss": float(loss)})
        assert run.should_stop == (len(bests) >= patience and not any(bests[-patience:]))
        if run.should_stop:
            return


def test_a_loss_that_is_none_is_not_the_best() -> None:
    stopping, run = EarlyStopping(2, metric="loss"), SimpleNamespace(should_stop=False)
    for loss in (1.0, math.nan, math.nan):
        stopping.on_epoch_end(run, {"loss": loss})
    assert run.should_stop


@pytest.mark.parametrize("interrupted", [False, True])
def test_training_ends_early_and_keeps_the_best(tmp_path: Path, interrupted: bool) -> None:
    """Also if it goes on from a checkpoint, which knows how long it has waited."""
    more: Any = {"checkpoint": CheckpointConfig(2)} if interrupted else {}
    if interrupted:
        train_with_callbacks(tmp_path, 60, [EarlyStopping(3), BestCheckpoint(), Stop(2)], **more)
        net = network()
        with trainer(tmp_path, **more) as made:
            made.load_checkpoint(Fit(), net)
            arguments: Any = {"epochs": 60, "batch_size": BATCH, "held_out": data(1)}
            made.train(
                Fit(), net, data(), callbacks=[EarlyStopping(3), BestCheckpoint()], **arguments
            )
    else:
        train_with_callbacks(tmp_path, 60, [EarlyStopping(3), BestCheckpoint()])
    losses = [line["held_out_loss"] for line in lines(tmp_path)]
    best = int(np.argmin(losses))
    assert best > 1
    assert len(losses) == best + 4 < 60
    with BaseTrainer({"name": "run", "exp_dir": str(tmp_path)}) as made:
        net = network()
        state = made.load_checkpoint(Fit(), net, tmp_path / "best" / "latest")
        assert state.epoch == best + 1
        made.train(Fit(), net, data(), epochs=state.epoch, batch_size=BATCH)
        assert made.evaluate(data(1), batch_size=BATCH) == pytest.approx(losses[best], rel=1e-5)
    assert len(list((tmp_path / "best").glob("*-step-*"))) == 1


class Stop(Callback):
    """Ends training after so many epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
        trainer.should_stop = trainer.state.epoch >= self.epochs


def train_ranks_with_callbacks(comm: Any, job: str, folder: Path) -> int:
    with launched(comm.rank, comm.size, job):
        callbacks = [EarlyStopping(2), BestCheckpoint(), CSVLogger(), PosteriorStatistics()]
        return len(train_with_callbacks(folder, 60, callbacks))


def test_all_ranks_end_together(shm: RankPool, tmp_path: Path) -> None:
    first, second = shm.run(
        train_ranks_with_callbacks, secrets.token_hex(4), tmp_path, size=2, limit=60
    )
    assert first == second < 60
    assert len(lines(tmp_path)) == first
    with (tmp_path / "logs/run.csv").open() as file:
        assert [int(row["epoch"]) for row in csv.DictReader(file)] == list(range(1, first + 1))


def test_tables(tmp_path: Path) -> None:
    """Rows are as in the lines; a run that goes on replaces what comes again."""
    train_with_callbacks(
        tmp_path, 4, [CSVLogger(), PosteriorStatistics()], checkpoint=CheckpointConfig(15)
    )
    with trainer(tmp_path) as made:
        net = network()
        (third,) = (tmp_path / "checkpoints").glob("*-step-15")
        made.load_checkpoint(Fit(), net, third)
        arguments: Any = {"epochs": 5, "batch_size": BATCH, "held_out": data(1)}
        made.train(Fit(), net, data(), callbacks=[CSVLogger(), PosteriorStatistics()], **arguments)
    with (tmp_path / "logs/run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4, 5]
    told = lines(tmp_path)
    for row, line in zip(rows, told[:3] + told[4:], strict=True):
        assert {name: float(value) for name, value in row.items()} == line
    assert "0 (Linear(3,16))/mean_var" in rows[0]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_with_callbacks(tmp_path, 3, [TensorBoardLogger()])
    events = EventAccumulator(str(tmp_path / "logs/tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("held_out_loss")]
    told = [(line["num_steps"], line["held_out_loss"]) for line in lines(tmp_path)]
    assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in told]


def test_tensorboard_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[tensorboard\]'"):
        TensorBoardLogger()


def test_the_posterior(tmp_path: Path) -> None:
    """Of the last step: what is capped follows from the engine's deltas before it."""
    x, y = data()
    steps = SAMPLES // BATCH
    seen: list[dict[str, float]] = []

    class Keep(Callback):
        def on_metrics(self, trainer: Any, metrics: Any) -> None:
            seen.append(metrics)

    net, task = network(), Fit()
    task.noise = 0.05  # so little that some steps are capped
    batches: list[Any] = []
    run = task.run_model
    task.run_model = lambda model, batch, state: (  # type: ignore[method-assign]
        batches.append(batch),
        run(model, batch, state),
    )[1]
    with BaseTrainer({"name": "run", "exp_dir": str(tmp_path)}) as made:
        callbacks = [PosteriorStatistics(), Keep()]
        made.train(task, net, (x, y), epochs=1, batch_size=BATCH, callbacks=callbacks)
    assert len(batches) == steps

    plain, updater = network(), OutputUpdater("cpu")
    for index, (inputs, targets) in enumerate(batches):
        plain(inputs)
        noise = np.full(len(inputs), task.noise, np.float32)
        updater.update(plain.output_z_buffer, targets.ravel(), noise, plain.input_delta_z_buffer)
        plain.backward()
        if index < steps - 1:
            plain.step()
    for number, handle in enumerate(plain._cpp_backend.layers):
        if not handle.mu_w:
            continue
        moved = []
        for part in "wb":
            limit = np.sqrt(getattr(handle, f"var_{part}")) / 2.0  # of batches of less than 256
            deltas = [np.abs(getattr(handle, f"delta_{of}_{part}")) for of in ("mu", "var")]
            moved.append((deltas[0] >= limit) | (deltas[1] >= limit))
        name = f"{number} ({handle.get_layer_info()})"
        assert seen[0][f"{name}/capped"] == pytest.approx(np.concatenate(moved).mean(), abs=0.03)
        after = net._cpp_backend.layers[number]
        means, variances = (
            np.concatenate([getattr(after, f"{of}_{part}") for part in "wb"])
            for of in ("mu", "var")
        )
        assert seen[0][f"{name}/mean_abs_mu"] == pytest.approx(np.abs(means).mean(), rel=1e-5)
        assert seen[0][f"{name}/mean_var"] == pytest.approx(variances.mean(), rel=1e-5)
        assert seen[0][f"{name}/negative_variances"] == 0
    assert 0 < seen[0]["0 (Linear(3,16))/capped"] < 1


def test_the_agreement_of_merges(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Keep(Callback):
        def on_metrics(self, trainer: Any, metrics: Any) -> None:
            seen.append(metrics)

    config = DDPConfig([], "auto", 0, 1)
    with DDPSequential(network(), config, reduction="precision", sync_every=2) as model:
        train_with_callbacks(tmp_path, 1, [PosteriorStatistics(), Keep()], model)
    assert "0 (Linear(3,16))/agreement" in seen[0]
    assert "0 (Linear(3,16))/capped" not in seen[0]


def test_what_callbacks_refuse(tmp_path: Path) -> None:
    arguments: Any = {"epochs": 1, "batch_size": BATCH}
    with (
        trainer(tmp_path) as made,
        pytest.raises(ValueError, match=r"no 'lost' among the metrics loss"),
    ):
        made.train(Fit(), network(), data(), callbacks=[EarlyStopping(metric="lost")], **arguments)
    with (
        trainer(tmp_path) as made,
        pytest.raises(TypeError, match="needs a TAGI network, got a Linear"),
    ):
        made.train(
            Fit(),
            nn.Linear(3, 1),
            data(),
            callbacks=[PosteriorStatistics()],
            optimizer=torch.optim.SGD,
            **arguments,
        )
    with pytest.raises(ValueError, match="patience must be"):
        EarlyStopping(0)
    with pytest.raises(TypeError, match="min_delta must be"):
        EarlyStopping(min_delta="a bit")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"no table of a CSVLogger: .*other\.csv; give another"):
        train_with_callbacks(tmp_path / "run", 1, [CSVLogger(other)])
    assert other.read_text() == "a,b\n1,2\n"
