"""Shares of batches that differ: micro-batches, ends of data, empty ones, greater ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, SIGMA_V, distance, fresh, learn, parameters
from support.rank_pool import RankPool
from support.reports import wrap

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.data import share_of


def train_with_micro_batches(comm: Any, name: str, splits: list[int]) -> tuple[float, float]:
    """Train with micro-batches, and on the same batches whole; return how far both are apart."""
    results = []
    for parts in (splits, [sum(splits)]):
        model = wrap(comm, name, average=False)
        start = parameters(model)
        for step in range(3):
            x, y = NETWORKS[name].batch(10 * comm.rank + step, sum(splits))
            with model.no_sync():
                for end, part in zip(np.cumsum(parts), parts, strict=True):
                    learn(model, x[end - part : end], y[end - part : end])
            model.step()
        results.append((start, parameters(model)))
    (start, micro), (other_start, whole) = results
    assert distance(start, other_start) == 0
    return distance(micro, whole), distance(start, whole)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
@pytest.mark.parametrize("splits", [[130, 140], [5, 6, 7]], ids=str)
def test_no_sync_sums_micro_batches(shm: RankPool, name: str, splits: list[int]) -> None:
    for apart, moved in shm.run(train_with_micro_batches, name, splits, size=2):
        assert apart < 1e-5
        assert moved > 1e-3


def train_as_two(comm: Any, name: str, compute: str) -> float:
    """Train by two ranks, and alone by their shares in turn; return how far both are apart."""
    options: dict[str, Any] = {"average": False, "compute": compute}
    together, alone = wrap(comm, name, **options), wrap(SingleCommunicator(), name, **options)
    for step in range(30):
        shares = [NETWORKS[name].batch(2 * step + rank, 5 + rank) for rank in range(2)]
        learn(together, *shares[comm.rank])
        together.step()
        with alone.no_sync():
            for share in shares:
                learn(alone, *share)
        alone.step()
    return distance(parameters(together), parameters(alone))


@pytest.mark.parametrize(
    ("name", "compute"), [("mlp", "native"), ("mlp", "torch"), ("mlp", "engine"), ("cnn", "torch")]
)
def test_two_ranks_equal_one_that_takes_their_shares(
    shm: RankPool, name: str, compute: str
) -> None:
    """Bit for bit: what ranks change is nothing but the order of sums."""
    assert shm.run(train_as_two, name, compute, size=2) == [0.0, 0.0]


def train_as_one(comm: Any, name: str) -> float:
    """Train by two ranks on shares, and alone on the batches; return how far both are apart."""
    options: dict[str, Any] = {"average": False, "compute": "native"}
    together, alone = wrap(comm, name, **options), wrap(SingleCommunicator(), name, **options)
    for step, size in enumerate([*range(1, 14), 32, *range(13, 0, -1)]):
        x, y = NETWORKS[name].batch(step, size)
        own = share_of(size, comm.rank, 2)
        learn(together, x[own], y[own])
        together.step()
        if step % 3:
            alone.learn(x, y, SIGMA_V**2)
        else:
            learn(alone, x, y)
            alone.step()
    return distance(parameters(together), parameters(alone))


@pytest.mark.parametrize("name", ["mlp", "lstm", "layer_norm"])
def test_one_process_equals_two_ranks_up_to_rounding(shm: RankPool, name: str) -> None:
    assert max(shm.run(train_as_one, name, size=2)) < 1e-5


def last_micro_batch_outside(comm: Any) -> bool:
    states = []
    for inside in (True, False):
        model = wrap(comm, average=False)
        batches = [NETWORKS["mlp"].batch(comm.rank + seed, 9) for seed in (0, 10)]
        with model.no_sync():
            learn(model, *batches[0])
            if inside:
                learn(model, *batches[1])
        if not inside:
            learn(model, *batches[1])
        model.step()
        learn(model, *batches[0])  # without no_sync nothing may be left over
        model.step()
        states.append(model.check_replicas())
    return states[0] == states[1]


def test_last_micro_batch_may_be_outside(shm: RankPool) -> None:
    assert shm.run(last_micro_batch_outside, size=2) == [True, True]


def join_with_batches(comm: Any, batches: list[int], average: bool) -> tuple[str, int]:
    model = wrap(comm, "batch_norm", average=average)
    x, y = NETWORKS["batch_norm"].batch(comm.rank, 12)
    steps = 0
    with model.join():
        for _ in range(batches[comm.rank]):
            learn(model, x, y)
            model.step()
            steps += 1
    digest = model.check_replicas()  # the group is in step again
    learn(model, x, y)
    model.step()
    model.check_replicas()
    return digest, steps


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batches", [[3, 1], [0, 2], [0, 0], [2, 4, 1]], ids=str)
def test_join(shm: RankPool, batches: list[int], average: bool) -> None:
    answers = shm.run(join_with_batches, batches, average, size=len(batches))
    assert [steps for _, steps in answers] == batches
    assert len({digest for digest, _ in answers}) == 1


def join_alone(comm: Any) -> float:
    """One rank goes on alone: the result is that of its own data on a single process."""
    model = wrap(comm, average=False)
    start = model.state_dict()
    data = [NETWORKS["mlp"].batch(seed, 8) for seed in range(4)]
    with model.join():
        if comm.rank == 0:
            for x, y in data:
                learn(model, x, y)
                model.step()
    alone = fresh("mlp")
    alone.load_state_dict(start)
    for x, y in data:
        learn(alone, x, y)
        alone.step()
    return distance(parameters(model), parameters(alone))


def test_joined_ranks_contribute_nothing(shm: RankPool) -> None:
    assert max(shm.run(join_alone, size=3)) < 1e-6


def empty_shares(comm: Any, shares: list[list[int]]) -> tuple[str, bool]:
    """Each step's batches are given per rank; compare with all samples on one process."""
    model = wrap(comm, average=False)
    start = model.state_dict()
    alone = fresh("mlp")
    alone.load_state_dict(start)
    for step, counts in enumerate(shares):
        x, y = NETWORKS["mlp"].batch(step, sum(counts))
        begin = sum(counts[: comm.rank])
        part = slice(begin, begin + counts[comm.rank])
        learn(model, x[part], y[part])
        model.step()
        learn(alone, x, y)
        alone.step()
    return model.check_replicas(), distance(parameters(model), parameters(alone)) < 1e-5


def test_empty_shares(shm: RankPool) -> None:
    shares = [[9, 8, 7], [5, 0, 4], [0, 3, 0], [0, 0, 6], [2, 2, 2]]
    answers = shm.run(empty_shares, shares, size=3)
    assert len(set(answers)) == 1
    assert answers[0][1]


def empty_micro_batches(comm: Any) -> bool:
    states = []
    for empty in (True, False):
        model = wrap(comm, average=False)
        with model.no_sync():
            for seed, size in ((0, 4), (1, 0), (2, 5), (3, 0)):
                if size or empty:
                    learn(model, *NETWORKS["mlp"].batch(seed, size))
        model.step()
        states.append(model.check_replicas())
    return states[0] == states[1]


def test_empty_micro_batches(shm: RankPool) -> None:
    assert shm.run(empty_micro_batches, size=2) == [True, True]


def grow(comm: Any) -> bool:
    """A batch greater than the first: the engine by itself writes beyond its buffers."""
    model = wrap(comm, "cnn")
    learn(model, *NETWORKS["cnn"].batch(0, 2))
    model.step()
    x, _ = NETWORKS["cnn"].batch(1, 300)
    parts = [model(x[i : i + 2])[0] for i in range(0, 300, 2)]
    whole = model(x)[0]
    return bool(np.allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6))


def test_growing_batch(shm: RankPool) -> None:
    assert shm.run(grow, size=1) == [True]


def evaluate_more_than_trained(comm: Any) -> float:
    """Batches grow in evaluation, then in training; compare with a model that had room at once."""
    states = []
    for largest_first in (False, True):
        model = wrap(comm, "resnet", average=False)
        if largest_first:
            model(NETWORKS["resnet"].batch(9, 60)[0])
        learn(model, *NETWORKS["resnet"].batch(0, 6))
        model.step()
        model.eval()
        model(NETWORKS["resnet"].batch(1, 50)[0])
        model.train()
        learn(model, *NETWORKS["resnet"].batch(2, 60))
        model.step()
        states.append(parameters(model))
    return distance(*states)


def test_evaluation_may_take_more_than_training(shm: RankPool) -> None:
    assert shm.run(evaluate_more_than_trained, size=1)[0] < 1e-6


def running_means(comm: Any, shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the running mean after a step, and the one of this rank's share."""
    model = wrap(comm, "batch_norm")
    learn(model, *NETWORKS["batch_norm"].batch(comm.rank, shares[comm.rank]))
    own = np.array(model.model.get_norm_mean_var()["BatchNorm2d()_1"][0])
    model.step()
    return np.array(model.model.get_norm_mean_var()["BatchNorm2d()_1"][0]), own


def test_running_statistics_are_the_weighted_mean(shm: RankPool) -> None:
    shares = [8, 24, 4]
    answers = shm.run(running_means, shares, size=3)
    expected = sum(share * own for share, (_, own) in zip(shares, answers, strict=True)) / 36
    assert not np.allclose(answers[0][1], answers[1][1], rtol=1e-3)
    for merged, _ in answers:
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-7)
