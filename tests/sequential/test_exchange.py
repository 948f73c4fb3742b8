"""Every way to exchange deltas gives the same, over every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rank_pool import RankPool

from sequential.networks import NETWORKS, distance, learn, parameters
from sequential.reports import wrap
from sequential.tasks import train
from tagi_ddp import exchange

SHARES = (30, 41)
WAYS = ("_Fused", "_Bucket")


@pytest.fixture(scope="module")
def gloo() -> Iterator[RankPool]:
    pool = RankPool("gloo", 2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def mpi() -> Iterator[RankPool]:
    pool = RankPool("mpi", 2)
    yield pool
    pool.close()


def exchange_by(comm: Any, way: str, average: bool) -> tuple[str, Any]:
    model = wrap(comm, "batch_norm", average=average)
    model._exchange = getattr(exchange, way)(comm)
    train(model, "batch_norm", SHARES)
    with model.join():
        for step in range(3 * comm.rank):
            learn(model, *NETWORKS["batch_norm"].batch(step, 11))
            model.step()
    return model.check_replicas(), parameters(model)


@pytest.mark.parametrize("average", [True, False])
def test_fused_and_bucket_give_the_same_bits(shm: RankPool, average: bool) -> None:
    answers = [shm.run(exchange_by, way, average, size=2) for way in WAYS]
    assert len({digest for ranks in answers for digest, _ in ranks}) == 1


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_backends_give_the_same(
    shm: RankPool, backend: str, request: pytest.FixtureRequest
) -> None:
    expected = shm.run(exchange_by, "_Fused", False, size=2)[0][1]
    answers = request.getfixturevalue(backend).run(exchange_by, "_Bucket", False, limit=60)
    assert answers[0][0] == answers[1][0]
    assert distance(answers[0][1], expected) < 1e-6


def chosen(comm: Any) -> str:
    return type(wrap(comm)._exchange).__name__


def test_choice(shm: RankPool) -> None:
    assert set(shm.run(chosen, size=4)) == {"_Fused"}
    assert shm.run(chosen, size=1) == ["function"]


def five_ranks(comm: Any) -> tuple[str, str]:
    model = wrap(comm)
    train(model, "mlp", [3, 4, 5, 6, 7])
    return type(model._exchange).__name__, model.check_replicas()


def test_more_ranks_than_fused_suits() -> None:
    pool = RankPool("shm", 5)
    answers = pool.run(five_ranks, limit=60)
    pool.close()
    assert len(set(answers)) == 1
    assert answers[0][0] == "_Bucket"
