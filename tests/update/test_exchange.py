"""Every way to exchange deltas gives the same, over every backend."""

from __future__ import annotations

from typing import Any

import pytest
from support.networks import NETWORKS, distance, learn, parameters
from support.rank_pool import RankPool
from support.reports import wrap
from support.tasks import train

from tagi_ddp.communicators import topology
from tagi_ddp.update import exchange

SHARES = (30, 41)
WAYS = {"engine": ("Fused", "Bucket"), "torch": ("Fused", "Bucket", "Overlapped")}


def exchange_by(comm: Any, compute: str, way: str, average: bool) -> tuple[str, Any]:
    model = wrap(comm, "batch_norm", average=average, compute=compute)
    bucket = getattr(model.compute, "bucket", None)
    kind, part_bytes = getattr(exchange, way), exchange.PART_BYTES
    exchange.PART_BYTES = 256
    if kind is exchange.Overlapped:
        assert len(exchange.parts_of(model._replica.memory, exchange.PART_BYTES)) > 2
    setting = exchange.Setting(comm, model._replica, average, bucket)
    more = {"Fused": (comm,), "Bucket": (), "Overlapped": (bucket,)}[way]
    model._exchange = kind(setting, *more)
    exchange.PART_BYTES = part_bytes
    train(model, "batch_norm", SHARES)
    with model.join():
        for step in range(3 * comm.rank):
            learn(model, *NETWORKS["batch_norm"].batch(step, 11))
            model.step()
    return model.check_replicas(), parameters(model)


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("average", [True, False])
def test_all_ways_give_the_same_bits(shm: RankPool, average: bool, compute: str) -> None:
    answers = [shm.run(exchange_by, compute, way, average, size=2) for way in WAYS[compute]]
    assert len({digest for ranks in answers for digest, _ in ranks}) == 1


@pytest.mark.parametrize(("compute", "way"), [("engine", "Bucket"), ("torch", "Overlapped")])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_backends_give_the_same(
    shm: RankPool, backend: str, compute: str, way: str, request: pytest.FixtureRequest
) -> None:
    expected = shm.run(exchange_by, compute, "Fused", False, size=2)[0][1]
    answers = request.getfixturevalue(backend).run(
        exchange_by, compute, way, False, size=2, limit=60
    )
    assert answers[0][0] == answers[1][0]
    assert distance(answers[0][1], expected) < 1e-6


def chosen(comm: Any, compute: str) -> str:
    return type(wrap(comm, compute=compute)._exchange).__name__


def test_choice(shm: RankPool) -> None:
    assert set(shm.run(chosen, "engine", size=4)) == {"Fused"}
    assert set(shm.run(chosen, "torch", size=4)) == {"Bucket"}
    assert shm.run(chosen, "torch", size=1) == ["Alone"]


def chosen_between_hosts(comm: Any) -> list[str]:
    kinds, own_name, own_size = [], topology.host_id, exchange.PART_BYTES
    for size in (1 << 10, own_size):
        exchange.PART_BYTES = size
        for name in ("one host", f"host {comm.rank}"):
            topology.host_id = lambda name=name: name
            with comm.split(0) as part:  # one that has not asked where its ranks are
                kinds.append(type(wrap(part)._exchange).__name__)
    topology.host_id, exchange.PART_BYTES = own_name, own_size
    return kinds


def test_choice_between_hosts(gloo: RankPool) -> None:
    expected = ["Bucket", "Overlapped", "Bucket", "Bucket"]
    assert gloo.run(chosen_between_hosts, size=2, fresh=True) == [expected] * 2


def five_ranks(comm: Any) -> tuple[str, str]:
    model = wrap(comm)
    train(model, "mlp", [3, 4, 5, 6, 7])
    return type(model._exchange).__name__, model.check_replicas()


def test_more_ranks_than_fused_suits() -> None:
    pool = RankPool("shm", 5)
    answers = pool.run(five_ranks, limit=60)
    pool.close()
    assert len(set(answers)) == 1
    assert answers[0][0] == "Bucket"
