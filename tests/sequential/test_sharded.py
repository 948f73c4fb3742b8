"""Sharded replicas hold the same bits as others after every step, whatever carries them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import NETWORKS, distance, learn, parameters
from support.rank_pool import RankPool, doomed_pool
from support.reports import Report, report, set_delta_variances, wrap
from support.tasks import train_on_shares

from tagi_ddp import DDPSequential, PeerLost
from tagi_ddp._backend import shards
from tagi_ddp.communicators import Communicator

SHARES = (9, 7, 8, 11, 5)


def train_plain_and_sharded(
    comm: Communicator, name: str, average: bool, options: dict[str, Any]
) -> list[Any]:
    """Train plain replicas and sharded ones alike; return what each has at the end."""
    found = []
    for sharded in (False, True):
        model = wrap(comm, name, average=average, sharded=sharded, **options)
        digests = [train_hard(model, name), model.check_replicas()]
        found.append((digests, parameters(model), model.get_neg_var_w_counter()))
        model.close()
    return found


def train_hard(model: DDPSequential, name: str) -> str:
    """Take plain steps, micro-batches, empty shares, and ranks that run out of data."""
    rank, size = model.communicator.rank, model.communicator.size
    train_on_shares(model, name, SHARES[:size])
    for step in range(2):
        with model.no_sync():
            learn(model, *NETWORKS[name].batch(10 * step + rank, 4))
            learn(model, *NETWORKS[name].batch(10 * step + rank + 5, 3 + rank))
        model.step()
    x, y = NETWORKS[name].batch(rank, 5)
    if rank == 0 and size > 1:
        model(x[:0])
        model.backward()
    else:
        learn(model, x, y)
    model.step()
    with model.join():
        for step in range(1 + rank):
            learn(model, *NETWORKS[name].batch(30 + step + rank, 6))
            model.step()
    return model.check_replicas()


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("compute", ["engine", "torch"])
@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits(shm: RankPool, name: str, compute: str, average: bool) -> None:
    size = 2 + list(NETWORKS).index(name) % 3
    for plain, sharded in shm.run(
        train_plain_and_sharded, name, average, {"compute": compute}, size=size, limit=60
    ):
        assert plain[0] == sharded[0]
        assert plain[2] == sharded[2]


def test_same_bits_of_many_ranks() -> None:
    """More than those of which each reads all deltas of the engine."""
    pool = RankPool("shm", 5)
    try:
        answers = pool.run(
            train_plain_and_sharded, "resnet", False, {"compute": "engine"}, limit=60
        )
    finally:
        pool.close()
    for plain, sharded in answers:
        assert plain[0] == sharded[0]


@pytest.mark.parametrize(
    "pool", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)], indirect=True
)
def test_same_bits_over(pool: RankPool) -> None:
    for plain, sharded in pool.run(train_plain_and_sharded, "resnet", False, {}, size=2, limit=60):
        assert plain[0] == sharded[0]


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "batch_norm"])
def test_replicas_on_devices(shm: RankPool, name: str) -> None:
    """By way of the hosts; test_nccl.py has those that NCCL connects."""
    answers = shm.run(train_plain_and_sharded, name, True, {"device": "cpu:0"}, size=3, limit=60)
    for plain, sharded in answers:
        assert distance(plain[1], sharded[1]) == 0
    assert len({answer[1][0][-1] for answer in answers}) == 1


def make_all_variances_negative(
    comm: Communicator, compute: str, device: str
) -> list[tuple[str, dict[str, int]]]:
    """Make variances of all parts negative; return the hashes and counts, plain and sharded."""
    found = []
    for sharded in (False, True):
        model = wrap(comm, compute=compute, device=device, sharded=sharded)
        learn(model, *NETWORKS["mlp"].batch(comm.rank, 5))
        for layer in model._local.replica.layers:
            if device != "cpu":
                model._local.replica.parameters.deltas.chunk(2)[1].fill_(-1e9)
                continue
            weights = len(layer.handle.mu_w)
            set_delta_variances(
                model, layer.handle, [-1e9] * (weights // 2) + [0.0] * -(-weights // 2)
            )
        model._local.accumulation.samples = (
            1 if comm.rank == 0 else 0
        )  # a small cap factor: large steps
        model.step()
        found.append((model.check_replicas(), model.get_neg_var_w_counter()))
    return found


@pytest.mark.parametrize(
    ("pool", "compute", "device"),
    [
        ("shm", "engine", "cpu"),
        ("shm", "torch", "cpu"),
        ("gloo", "torch", "cpu"),
        ("shm", "torch", "cpu:0"),
        ("nccl", "torch", "cpu:0"),
    ],
    indirect=["pool"],
)
def test_all_ranks_count_negative_variances(pool: RankPool, compute: str, device: str) -> None:
    answers = pool.run(make_all_variances_negative, compute, device, size=2, limit=60)
    counts = answers[0][0][1]
    assert min(counts.values()) > 10
    for plain, sharded in answers:
        assert plain == sharded
        assert sharded[1] == counts


def refuse_a_sharded_step(comm: Communicator) -> tuple[Report, bool]:
    model = wrap(comm, sharded=True)
    x, y = NETWORKS["mlp"].batch(comm.rank, 6)
    before = model.check_replicas()
    learn(model, x * np.inf if comm.rank == 1 else x, y)
    return report(model.step), model.check_replicas() == before


@pytest.mark.parametrize("pool", ["shm", "gloo"], indirect=True)
def test_a_refused_step_changes_nothing(pool: RankPool) -> None:
    for (kind, _, ranks), unchanged in pool.run(refuse_a_sharded_step, size=2):
        assert (kind, ranks) == ("NotFiniteError", (1,))
        assert unchanged


def lose(comm: Communicator, victim: int) -> Report:
    import os

    model = wrap(comm, sharded=True)
    for step in range(3):
        learn(model, *NETWORKS["mlp"].batch(step, 6))
        if comm.rank == victim and step == 1:
            os._exit(1)
        if step == 1:
            return report(model.step)
        model.step()
    raise AssertionError


def test_a_rank_that_dies_is_named() -> None:
    with doomed_pool("shm", 3) as pool:
        answers = pool.run(lose, 1, dying=[1])
    for kind, _, ranks in (answers[0], answers[2]):
        assert (kind, ranks) == (PeerLost.__name__, (1,))


def wrap_with_wrong_options(comm: Communicator, differ: bool) -> Report:
    options = {"sharded": comm.rank == 0} if differ else {"reduction": "precision", "sharded": True}
    return report(lambda: wrap(comm, **options))


@pytest.mark.parametrize(
    ("differ", "kind", "text"),
    [(False, "ValueError", "sharded"), (True, "ReplicaMismatch", "option sharded")],
)
def test_errors(shm: RankPool, differ: bool, kind: str, text: str) -> None:
    for error in shm.run(wrap_with_wrong_options, differ, size=2, fresh=True):
        assert error[0] == kind
        assert text in error[1]


@given(size=st.integers(0, 10_000), ranks=st.integers(1, 40))
@settings(deadline=None)
def test_shards_cover_all_parameters_once(size: int, ranks: int) -> None:
    found = shards(size, ranks)
    assert len(found) == ranks
    end = 0
    for begin, count in found:
        assert begin == end
        assert begin % 16 == 0 or begin == size
        end += count
    assert end == size
    assert max(count for _, count in found) <= size / ranks + 32
