"""Every way to exchange deltas gives the same, over every backend."""

from __future__ import annotations

import re
from typing import Any

import pytest
from contract.data import caught
from support.networks import NETWORKS, distance, learn, parameters
from support.rank_pool import RankPool
from support.reports import wrap
from support.tasks import train_on_shares

from tagi_ddp.update import exchange

SHARES = (30, 41)
WAYS = {"engine": ("InSharedMemory", "Bucket")}
WAYS["torch"] = WAYS["native"] = (*WAYS["engine"], "Overlapped")


def exchange_by(comm: Any, compute: str, way: str, average: bool) -> tuple[str, Any]:
    name = "mlp" if compute == "native" else "batch_norm"
    model = wrap(comm, name, average=average, compute=compute)
    bucket = getattr(model.compute, "bucket", None)
    setting = exchange.Setting(comm, model._local.replica, average, bucket)
    if way == "Bucket":
        model._ranks.exchange = exchange.Bucket(setting)
    elif way == "Overlapped":
        part_bytes, exchange.PART_BYTES = exchange.PART_BYTES, 256
        assert (
            len(exchange.parts_of(model._local.replica.parameters.blocks, exchange.PART_BYTES)) > 2
        )
        model._ranks.exchange = exchange.Overlapped(setting, bucket)
        exchange.PART_BYTES = part_bytes
    else:
        shared = comm.empty(2 * model._local.replica.parameters.size) if bucket is None else bucket
        model._ranks.exchange = exchange.InSharedMemory(setting, comm, shared)
    train_on_shares(model, name, SHARES)
    with model.join():
        for step in range(3 * comm.rank):
            learn(model, *NETWORKS[name].batch(step, 11))
            model.step()
    return model.check_replicas(), parameters(model)


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("average", [True, False])
def test_all_ways_give_the_same_bits(shm: RankPool, average: bool, compute: str) -> None:
    answers = [shm.run(exchange_by, compute, way, average, size=2) for way in WAYS[compute]]
    assert len({digest for ranks in answers for digest, _ in ranks}) == 1


@pytest.mark.parametrize(("compute", "way"), [("engine", "Bucket"), ("torch", "Overlapped")])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_backends_give_the_same(shm: RankPool, backend: str, compute: str, way: str) -> None:
    expected = shm.run(exchange_by, compute, "InSharedMemory", False, size=2)[0][1]
    pool = RankPool(backend, 2, environment={"RANK_POOL_HOSTS": "ab"})
    answers = pool.run(exchange_by, compute, way, False, limit=60)
    pool.close()
    assert answers[0][0] == answers[1][0]
    assert distance(answers[0][1], expected) < 1e-6


def chosen(comm: Any, compute: str) -> str:
    return type(wrap(comm, compute=compute)._ranks.exchange).__name__


@pytest.mark.parametrize("compute", ["engine", "native", "torch"])
def test_choice(shm: RankPool, compute: str) -> None:
    assert set(shm.run(chosen, compute, size=4)) == {"InSharedMemory"}
    assert shm.run(chosen, compute, size=1) == ["Alone"]


def chosen_by_size(comm: Any) -> list[str]:
    kinds, own_size = [], exchange.PART_BYTES
    for size in (1 << 10, own_size):
        exchange.PART_BYTES = size
        kinds.append(type(wrap(comm)._ranks.exchange).__name__)
    exchange.PART_BYTES = own_size
    return kinds


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK_POOL_HOSTS": "ab"}, ["Overlapped", "Bucket"]),
        ({"TAGI_DDP_TWO_LEVELS": "0"}, ["Bucket", "Bucket"]),  # on one host, by TCP
    ],
    ids=["two hosts", "one host"],
)
def test_choice_on_a_network(environment: dict[str, str], expected: list[str]) -> None:
    pool = RankPool("gloo", 2, environment=environment)
    answers = pool.run(chosen_by_size, limit=60)
    pool.close()
    assert answers == [expected] * 2


def learn_until_one_fails(comm: Any, compute: str, sharded: bool, steps: int) -> int:
    """Return the number of the collective after so many steps, as the error of rank 0 names it."""
    model = wrap(comm, average=False, compute=compute, sharded=sharded)
    x, y = NETWORKS["mlp"].batch(comm.rank, 9)
    model.learn(x, y, 0.1)  # the first one also compares the rows of the ranks
    for _ in range(steps):
        model.learn(x, y, 0.1)
    error = caught(lambda: model.learn(x, y[: 9 - comm.rank], 0.1))
    return int(re.findall(r"#(\d+) on rank 0", str(error))[0]) if comm.rank == 0 else 0


@pytest.mark.parametrize("compute", ["engine", "native", "torch"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_step_is_one_collective(shm: RankPool, compute: str, sharded: bool) -> None:
    first, later = (
        shm.run(learn_until_one_fails, compute, sharded, steps, size=2, fresh=True)[0]
        for steps in (0, 5)
    )
    assert later - first == 5


def five_ranks(comm: Any) -> tuple[str, str]:
    model = wrap(comm)
    train_on_shares(model, "mlp", [3, 4, 5, 6, 7])
    return type(model._ranks.exchange).__name__, model.check_replicas()


def test_five_ranks() -> None:
    pool = RankPool("shm", 5)
    answers = pool.run(five_ranks, limit=60)
    pool.close()
    assert len(set(answers)) == 1
    assert answers[0][0] == "InSharedMemory"
