"""Series over ranks: what a network remembers of a series is its rank's own.

One rank a series, one step at a time, is one process that takes the series in turn, with the
states of each, and steps after all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.networks import distance, learn, parameters
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.sequential import accelerate

STEPS = 6
COMPUTES = ("engine", "native", "torch")


def network(smooths: bool = False) -> Any:
    import pytagi
    import pytagi.nn as nn

    pytagi.manual_seed(5)
    if smooths:
        return nn.Sequential(nn.SLSTM(1, 6, seq_len=1), nn.SLSTM(6, 4, seq_len=1), nn.SLinear(4, 1))
    return nn.Sequential(nn.LSTM(1, 6, seq_len=1), nn.LSTM(6, 4, seq_len=1), nn.Linear(4, 1))


def series(number: int) -> np.ndarray:
    times = np.arange(2 * STEPS + 1) + 10 * number
    return np.sin(times).astype(np.float32)[:, None]


def train_series(model: Any, values: np.ndarray, steps: range) -> None:
    for step in steps:
        learn(model, values[step], values[step + 1])
        model.step()


def train_series_of_ranks(comm: Any, compute: Any) -> Any:
    model = DDPSequential(network(), average=False, communicator=comm, compute=compute)
    train_series(model, series(comm.rank), range(STEPS))
    model.check_replicas()
    return parameters(model), model.get_lstm_states()


def in_turn(compute: Any, count: int) -> tuple[Any, list[Any]]:
    """Do the same in one process; return the parameters, and each series' states."""
    model = accelerate(network(), compute)
    model(series(0)[0])  # states are of a batch's size: of one there was none yet
    model.reset_lstm_states()
    states = [model.get_lstm_states() for _ in range(count)]
    for step in range(STEPS):
        with model.no_sync():
            for number in range(count):
                values = series(number)
                model.set_lstm_states(states[number])
                learn(model, values[step], values[step + 1])
                states[number] = model.get_lstm_states()
        model.step()
    return parameters(model), states


@pytest.mark.parametrize("compute", COMPUTES)
def test_each_rank_its_series(shm: RankPool, compute: str) -> None:
    alone, states = in_turn(compute, 3)
    found = shm.run(train_series_of_ranks, compute, size=3)
    for (ours, own_states), expected in zip(found, states, strict=True):
        assert distance(ours, alone) < 1e-5
        for index, parts in expected.items():
            for part, own in zip(parts, own_states[index], strict=True):
                np.testing.assert_allclose(own, part, rtol=1e-4, atol=1e-6)
    first, second = (own[1][0][0] for own in found[:2])
    assert not np.allclose(first, second)


def train_and_resume_series(comm: Any, compute: Any, folder: str) -> bool:
    """Train, save, and go on in another model; return whether it is as without."""
    whole = DDPSequential(network(), average=False, communicator=comm, compute=compute)
    values = series(comm.rank)
    train_series(whole, values, range(STEPS))
    whole.save(f"{folder}/parameters")
    states = whole.get_lstm_states()
    train_series(whole, values, range(STEPS, 2 * STEPS))

    resumed = DDPSequential(network(), average=False, communicator=comm, compute=compute)
    resumed.load(f"{folder}/parameters")
    resumed(values[0])  # states are of a batch's size
    resumed.set_lstm_states(states)
    train_series(resumed, values, range(STEPS, 2 * STEPS))
    return bool(resumed.check_replicas() == whole.check_replicas())


@pytest.mark.parametrize("compute", COMPUTES)
def test_resumed(shm: RankPool, compute: str, tmp_path: Path) -> None:
    assert all(shm.run(train_and_resume_series, compute, str(tmp_path), size=2))


def smoothed(comm: Any, compute: Any) -> Any:
    model = DDPSequential(network(True), average=False, communicator=comm, compute=compute)
    model.num_samples = STEPS
    for _ in range(2):
        train_series(model, series(comm.rank), range(STEPS))
        outputs = model.smoother()
    model.check_replicas()
    return outputs


def test_each_rank_smooths_its_series(shm: RankPool) -> None:
    """The same by both who can, and other series are smoothed to other values."""
    native, engine = (shm.run(smoothed, compute, size=2) for compute in ("native", "engine"))
    for ours, theirs in zip(native, engine, strict=True):
        for own, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5)
    assert not np.allclose(native[0][0], native[1][0])


def checkpointed(comm: Any, compute: Any, folder: str) -> bool:
    """Do the same with a checkpoint, which needs no hand."""
    whole = DDPSequential(network(), average=False, communicator=comm, compute=compute)
    values = series(comm.rank)
    with Checkpoints(folder, whole) as checkpoints:
        train_series(whole, values, range(STEPS))
        checkpoints.save(STEPS)
        train_series(whole, values, range(STEPS, 2 * STEPS))

    resumed = DDPSequential(network(), average=False, communicator=comm, compute=compute)
    with Checkpoints(folder, resumed) as checkpoints:
        train_series(resumed, values, range(checkpoints.resume(), 2 * STEPS))
    return bool(resumed.check_replicas() == whole.check_replicas())


@pytest.mark.parametrize("compute", [*COMPUTES, "auto"])
def test_resumed_from_a_checkpoint(shm: RankPool, compute: str, tmp_path: Path) -> None:
    assert all(shm.run(checkpointed, compute, str(tmp_path), size=2))
