"""Ranks of several hosts: every collective in chunks, the same on both levels as on one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.data import caught
from contract.failures import WAITS, come_late
from contract.operations import own_memory
from support.rank_pool import RankPool

from tagi_ddp.communicators import PeerLost, Timeout

# Of each rank a letter, its host's.
PLACES_OF_GLOO = [("gloo", "ab"), ("gloo", "aabab"), ("gloo", "abcc")]
PLACES = [*PLACES_OF_GLOO, ("mpi", "aba"), ("mpi", "abc")]
MORE_PLACES = [
    ("gloo", "abc"),
    ("gloo", "aabb"),
    ("gloo", "abab"),
    ("mpi", "aaa"),
    ("mpi", "ab"),
    ("mpi", "abcc"),
]

EXPECTED = {
    "sum": lambda rows: rows.sum(axis=0, dtype=rows.dtype),
    "mean": lambda rows: rows.mean(axis=0, dtype=np.float64),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
}


@pytest.fixture(
    scope="module",
    params=[*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in MORE_PLACES)],
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    backend, place = request.param
    pool = RankPool(backend, len(place), environment={"RANK_POOL_HOSTS": place})
    yield pool
    pool.close()


def all_of_them(comm: Any, seed: int) -> list[tuple[str, bytes]]:
    """Check every collective against numpy; return the bytes that must be equal on all ranks."""
    from tagi_ddp.communicators.host import two_level

    two_level._SMALL_CHUNK, two_level._LARGE_CHUNK = 64, 4096
    comm._engine.chunks = 5
    two_level._FEW_HOSTS = 16 * (seed % 2)
    two_level.SMALL = 1000
    comm._engine.sums_meet = seed > 1
    if comm.backend == "mpi":
        from tagi_ddp.communicators.host import mpi_requests

        mpi_requests._PIECE, mpi_requests._FLYING, mpi_requests._PART = 64, 3, 1000
    rng, told = np.random.default_rng(seed), []
    size, rank = comm.size, comm.rank
    for dtype in (np.float32, np.float16, np.uint8, np.int16, np.uint64, np.float64):
        count = int(rng.integers(0, 1500))
        given = (rng.normal(size=(size, count)) * 50).astype(np.int64).astype(dtype)
        for op in ("sum", "min", "max", *(["mean"] if dtype(0.5) else [])):
            out = np.empty(count, dtype)
            comm.all_reduce(given[rank].copy(), op, out=out)
            expected = EXPECTED[op](given)
            np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=2e-3)
            told.append((f"{op} {np.dtype(dtype)}", out.tobytes()))
        counts = rng.multinomial(count, np.ones(size) / size).tolist()
        ends = np.cumsum([0, *counts])
        mine = slice(ends[rank], ends[rank + 1])
        out = np.empty(counts[rank], dtype)
        comm.reduce_scatter(given[rank].copy(), out, counts, "max")
        assert (out == given.max(axis=0)[mine]).all()
        whole = np.empty(count, dtype)
        comm.all_gather(given[0][mine].copy(), whole, counts)
        assert (whole == given[0]).all()
        for root in range(size):
            data = given[root].copy() if rank == root else np.zeros(count, dtype)
            comm.broadcast(data, root)
            assert (data == given[root]).all()
        table = rng.integers(0, 40, (size, size))
        sent = [np.full(table[rank][other], rank * size + other, dtype) for other in range(size)]
        came = np.empty(table[:, rank].sum(), dtype)
        comm.all_to_all(np.concatenate(sent), came, table[rank].tolist(), table[:, rank].tolist())
        parts = [np.full(table[other][rank], other * size + rank, dtype) for other in range(size)]
        assert (came == np.concatenate(parts)).all()
    return told


def test_all_collectives(pool: RankPool) -> None:
    for seed in range(3):
        first, *others = pool.run(all_of_them, seed)
        assert all(other == first for other in others)


def in_own_memory(comm: Any, chunk: int, alone: int) -> None:
    from tagi_ddp.communicators.host import two_level

    two_level._SMALL_CHUNK = two_level._LARGE_CHUNK = chunk
    two_level.SMALL = alone
    own_memory(comm, "float32")


@pytest.mark.parametrize(("chunk", "alone"), [(1 << 12, 0), (1 << 16, 1 << 20), (1 << 23, 0)])
def test_own_memory(pool: RankPool, chunk: int, alone: int) -> None:
    pool.run(in_own_memory, chunk, alone)


def sums_of_the_engine(comm: Any) -> list[bool]:
    """Return of which sums this rank sends a part: of nothing, of few bytes, more, and many."""
    from tagi_ddp.communicators.host import two_level

    two_level.SMALL = 1 << 13
    engine, found = comm._lane or comm._engine, []
    begin = engine.all_reduce

    def counted(*arguments: Any) -> Any:
        found[-1] = True
        return begin(*arguments)

    engine.all_reduce = counted
    for count in (0, 1, 1000, 4000):
        found.append(False)
        total = np.full(count, comm.rank + 1.0)
        comm.all_reduce(total)
        assert (total == comm.size * (comm.size + 1) / 2).all()
    engine.all_reduce = begin
    return found


def test_who_sends_few_bytes(pool: RankPool) -> None:
    """The first rank of a host; gloo's ranks send up to 1 KB with their handshake."""
    found = pool.run(sums_of_the_engine, fresh=True)
    place = pool._environment["RANK_POOL_HOSTS"]
    lanes = min(map(place.count, place))
    for rank, sums in enumerate(found):
        local = place[:rank].count(place[rank])
        if len(set(place)) == 1:  # all in memory
            assert sums == [False] * 4
            continue
        by_mpi, first, alone = pool.backend == "mpi", local == 0, len(set(place)) == len(place)
        assert sums == [by_mpi and alone, by_mpi and first, first, local < lanes]


def test_a_late_rank_is_told(pool: RankPool, tmp_path: Path) -> None:
    """Though what the others sent before they gave up still reaches it."""
    call = WAITS["all_reduce"]
    *others, late = pool.run(come_late, call, tmp_path, fresh=True, timeout=1)
    assert all(kind is Timeout for reports in others for kind, *_ in reports)
    assert all(kind is PeerLost for kind, *_ in late)


def differ(comm: Any, way: str) -> tuple[str, str]:
    own = comm.empty(9000) if way != "size" else None
    if own is None:
        error = caught(lambda: comm.empty(100 + comm.rank))
    elif way == "op":
        error = caught(lambda: comm.all_reduce(own, "mean" if comm.rank % 2 else "sum"))
    elif way == "offset":
        error = caught(lambda: comm.all_reduce(own[comm.rank : comm.rank + 8000]))
    else:
        last = comm.rank == comm.size - 1
        error = caught(lambda: comm.all_reduce(np.zeros(9000, np.float32) if last else own))
    return type(error).__name__, str(error)


@pytest.mark.parametrize("way", ["memory", "offset", "op", "size"])
def test_own_memory_that_differs(pool: RankPool, way: str) -> None:
    """All hear what differs, wherever they are, instead of waiting until the time is up."""
    for kind, text in pool.run(differ, way, fresh=True):
        assert kind == "Mismatch", text
        assert "this rank" in text
        assert way in ("op", "size") or "gave from byte" in text


def wait_for_each_other(comm: Any) -> int:
    """Return how many messages of ranks that waited are kept when all have come to a later sum."""
    for late in range(comm.size):
        time.sleep(0.2 * (comm.rank == late))
        comm.barrier()
    time.sleep(0.3 * (comm.rank == 0))
    comm.all_reduce(np.ones(2000))
    time.sleep(0.1)  # until all have been read
    comm.all_reduce(np.ones(2000))
    last = comm._numbers["collectives"]  # on a busy machine ranks wait in this one, too
    return sum(number < last for _, _, number in comm._channel.notes.entered)


def test_who_waited_is_forgotten(pool: RankPool) -> None:
    assert not any(pool.run(wait_for_each_other))


def way(comm: Any) -> tuple[str, int | None]:
    """Return how data travel, and in how many lanes."""
    return type(comm._way).__name__, getattr(comm._way, "_lanes", None)


def test_a_lane_is_a_rank_of_each_host(pool: RankPool) -> None:
    place = pool._environment["RANK_POOL_HOSTS"]
    expected: tuple[str, int | None] = "TwoLevel", min(map(place.count, place))
    if len(set(place)) == len(place):
        expected = "Flat", None
    if len(set(place)) == 1:
        expected = "OneHost", None
    assert pool.run(way) == [expected] * len(place)


def measured(comm: Any) -> tuple[float | None, float | None]:
    return getattr(comm._way, "_latency", None), getattr(comm._way, "_rate", None)


def test_all_ranks_know_the_same_network(pool: RankPool) -> None:
    [first, *others] = pool.run(measured)
    assert all(other == first for other in others)
    latency, rate = first
    if latency is not None:
        assert 0 < latency < 1
        assert rate > 1e5


def test_chunks_are_worth_the_waits_for_them() -> None:
    from tagi_ddp.communicators.host.two_level import number_of_chunks

    assert number_of_chunks(2e6, 1e-4, 1e8, 4) == 4  # 20 ms on the network
    assert number_of_chunks(2e6, 1e-4, 1e9, 4) == 1  # 2 ms
    assert number_of_chunks(2e6, 5e-2, 1e8, 4) == 1  # most of it latency
    assert number_of_chunks(1e9, 1e-4, math.inf, 4) == 119


def ways_if_asked_for(comm: Any, job: str) -> list[tuple[str, int | None]]:
    """One rank's wish is that of all."""
    import os

    from tagi_ddp import init

    found = []
    os.environ["TAGI_DDP_TWO_LEVELS"] = "no"
    if len(set(os.environ["RANK_POOL_HOSTS"])) < comm.size:
        with pytest.raises((ValueError, RuntimeError), match="TAGI_DDP_TWO_LEVELS must be"):
            init("gloo", comm.rank, comm.size, job=f"{job} no", timeout=20)
        comm.barrier()
    for wish in ("1", "0"):
        os.environ["TAGI_DDP_TWO_LEVELS"] = wish if comm.rank == 1 else "1"
        settings = {"rank": comm.rank, "world_size": comm.size, "job": f"{job} {wish}"}
        with init("gloo", **settings, timeout=20) as other:
            found.append(way(other))
            total = np.ones(5)
            other.all_reduce(total)
            assert (total == comm.size).all()
        comm.barrier()
    return found


# MPI's ranks would import torch one by one.
@pytest.mark.parametrize("pool", PLACES_OF_GLOO, indirect=True)
def test_the_way_out(pool: RankPool) -> None:
    [first, *others] = pool.run(ways_if_asked_for, "way out")
    assert first[1] == ("Flat", None)
    assert all(other == first for other in others)


def way_of_another_user(comm: Any, job: str) -> tuple[str, bool]:
    """Say that rank 1 belongs to somebody else."""
    import os
    import warnings

    from tagi_ddp import init

    own = os.getuid()
    os.getuid = lambda: own + (comm.rank == 1)
    settings = {"rank": comm.rank, "world_size": comm.size, "job": job, "timeout": 20}
    try:
        with warnings.catch_warnings(record=True) as found, init("gloo", **settings) as other:
            total = np.ones(5)
            other.all_reduce(total)
            assert (total == comm.size).all()
            return way(other)[0], any("several users" in str(each.message) for each in found)
    finally:
        os.getuid = lambda: own


def test_users_share_no_memory() -> None:
    pool = RankPool("gloo", 3, environment={"RANK_POOL_HOSTS": "aab"})
    with contextlib.closing(pool):
        assert pool.run(way_of_another_user, "users") == [("Flat", rank == 0) for rank in range(3)]
