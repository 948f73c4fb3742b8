"""Ranks of several hosts: every collective in chunks, the same by two levels as by one."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.data import caught
from contract.failures import WAITS, come_late
from contract.operations import own_memory
from support.rank_pool import Died, RankPool

from tagi_ddp.communicators import PeerLost, Timeout, init, two_level

# Of each rank a letter, its host's.
PLACES = [("gloo", "aba"), ("gloo", "aabab"), ("gloo", "abcc"), ("mpi", "aba")]
MORE_PLACES = [
    ("gloo", "ab"),
    ("gloo", "aab"),
    ("gloo", "abc"),
    ("gloo", "aabb"),
    ("gloo", "abab"),
    ("mpi", "aab"),
    ("mpi", "abc"),
    ("mpi", "aabb"),
    ("mpi", "abcc"),
]

EXPECTED = {
    "sum": lambda rows: rows.sum(axis=0, dtype=rows.dtype),
    "mean": lambda rows: rows.mean(axis=0, dtype=np.float64),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
}


def pool_of(backend: str, place: str, **more: str) -> RankPool:
    environment = {"RANK_POOL_HOSTS": place, "TAGI_DDP_TWO_LEVELS": "1", **more}
    return RankPool(backend, len(place), environment=environment)


@pytest.fixture(
    scope="module",
    params=[*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in MORE_PLACES)],
    ids="-".join,
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = pool_of(*request.param)
    yield pool
    pool.close()


def place_of(pool: RankPool) -> str:
    return str(pool._environment["RANK_POOL_HOSTS"])


def small_chunks() -> None:
    """Send few elements in as many chunks as many."""
    two_level.CHUNK, two_level._SMALL = 2000, 500
    from tagi_ddp.communicators.network import communicator

    communicator._PIECE = 1000


def all_of_them(comm: Any, seed: int) -> list[tuple[str, bytes]]:
    """Check every collective against numpy; return the bytes that must be equal on all ranks."""
    small_chunks()
    rng, found = np.random.default_rng(seed), []
    size, rank = comm.size, comm.rank
    for dtype in (np.float32, np.float16, np.uint8, np.int16, np.uint32, np.uint64, np.float64):
        count = int(rng.integers(0, 1500))
        given = (rng.normal(size=(size, count)) * 50).astype(np.int64).astype(dtype)
        for op in ("sum", "min", "max", *(["mean"] if dtype(0.5) else [])):
            out = np.empty(count, dtype)
            comm.all_reduce(given[rank].copy(), op, out=out)
            expected = EXPECTED[op](given)
            np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=2e-3)
            found.append((f"{op} {np.dtype(dtype)}", out.tobytes()))
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
            data.flags.writeable = rank != root
            comm.broadcast(data, root)
            assert (data == given[root]).all()
        table = rng.integers(0, 40, (size, size))
        sent = [np.full(table[rank][other], rank * size + other, dtype) for other in range(size)]
        came = np.empty(table[:, rank].sum(), dtype)
        comm.all_to_all(np.concatenate(sent), came, table[rank].tolist(), table[:, rank].tolist())
        parts = [np.full(table[other][rank], other * size + rank, dtype) for other in range(size)]
        assert (came == np.concatenate(parts)).all()
    return found


def test_all_collectives(pool: RankPool) -> None:
    for seed in range(3):
        first, *others = pool.run(all_of_them, seed)
        assert all(other == first for other in others)


def of_not_a_number(comm: Any) -> list[bytes]:
    """Return sums and extremes of numbers some of which are NaN, each rank's another one."""
    given = np.array([comm.rank, -comm.rank, 0.5, -0.0, 0.0, 1e30, 7.0], np.float32)
    given.view(np.uint32)[2] = 0x7FC00000 + comm.rank + (comm.rank % 2 << 31)
    given[6] = np.inf * (-1) ** comm.rank
    found = []
    for op in ("sum", "mean", "min", "max"):
        out = np.empty_like(given)
        comm.all_reduce(given, op, out=out)
        assert np.isnan(out[2])
        if op in ("min", "max"):
            assert out[0] == (comm.size - 1 if op == "max" else 0)
            assert out[6] == (np.inf if op == "max" else -np.inf)
        found.append(out.tobytes())
    return found


def test_not_a_number_is_the_same_on_all_ranks(pool: RankPool) -> None:
    first, *others = pool.run(of_not_a_number)
    assert all(other == first for other in others)


def in_own_memory(comm: Any, chunk: int, small: int) -> None:
    two_level.CHUNK, two_level._SMALL = chunk, small
    own_memory(comm, "float32")


@pytest.mark.parametrize(("chunk", "small"), [(1 << 12, 0), (1 << 16, 1 << 20), (1 << 23, 0)])
def test_own_memory(pool: RankPool, chunk: int, small: int) -> None:
    pool.run(in_own_memory, chunk, small)


def test_a_late_rank_is_told(pool: RankPool, tmp_path: Path) -> None:
    """Though what the others sent before they gave up still reaches it."""
    call = WAITS["all_reduce"]
    *others, late = pool.run(come_late, call, tmp_path, fresh=True, timeout=1)
    last = (len(others),)
    assert all(report[:2] == (Timeout, last) for reports in others for report in reports)
    assert all(kind is PeerLost for kind, *_ in late)


def call_differently_on_own_memory(comm: Any, way: str) -> tuple[str, str]:
    own = comm.empty(9000) if way != "size" else None
    if own is None:
        error = caught(lambda: comm.empty(100 + comm.rank))
    elif way == "op":
        error = caught(lambda: comm.all_reduce(own, "mean" if comm.rank % 2 else "sum"))
    else:
        last = comm.rank == comm.size - 1
        error = caught(lambda: comm.all_reduce(own[:8000] if last else own))
    return type(error).__name__, str(error)


@pytest.mark.parametrize("way", ["count", "op", "size"])
def test_own_memory_that_differs(pool: RankPool, way: str) -> None:
    """All learn what differs, wherever they are, instead of waiting until the time is up."""
    for kind, text in pool.run(call_differently_on_own_memory, way, fresh=True):
        assert kind == "Mismatch", text
        assert "this rank" in text


def differ_in_offset(comm: Any) -> str:
    own = comm.empty(9000)
    return type(caught(lambda: comm.all_reduce(own[comm.rank : comm.rank + 8000]))).__name__


def test_other_places_of_own_memory_on_a_host(pool: RankPool) -> None:
    if len(set(place_of(pool))) < len(place_of(pool)):
        assert "Mismatch" in pool.run(differ_in_offset, fresh=True)


def die_in_a_sum(comm: Any, victim: int) -> tuple[Any, tuple[int, ...], float]:
    comm.barrier()
    if comm.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), 9)
    data = np.ones(2_000_000, np.float32)
    begin = time.monotonic()
    error: Any = caught(lambda: [comm.all_reduce(data) for _ in range(10_000)])
    return type(error), error.ranks, time.monotonic() - begin


@pytest.mark.parametrize("place", ["aab", pytest.param("aabb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [0, -1])
def test_a_death_reaches_the_other_hosts(place: str, victim: int) -> None:
    """Within the promised half a second, and some for a busy machine."""
    with contextlib.closing(pool_of("gloo", place)) as pool:
        victim %= len(place)
        found = pool.run(die_in_a_sum, victim, dying=[victim])
    for rank, result in enumerate(found):
        if rank == victim:
            assert isinstance(result, Died)
            continue
        kind, ranks, seconds = result
        assert (kind, ranks) == (PeerLost, (victim,))
        assert seconds < 0.3 + 0.5 + 1.0


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


def test_messages_of_ranks_that_waited_are_forgotten(pool: RankPool) -> None:
    assert not any(pool.run(wait_for_each_other))


def levels(comm: Any) -> tuple[str, int, int | None]:
    """Return the kind of a communicator, and the sizes of its levels."""
    node, between = getattr(comm, "node", None), getattr(comm, "inter_node", None)
    return type(comm).__name__, node.size if node else 0, between.size if between else None


def test_the_levels(pool: RankPool) -> None:
    place = place_of(pool)
    senders = min(map(place.count, place))
    for rank, found in enumerate(pool.run(levels)):
        if len(set(place)) == len(place):
            assert found == ("NetworkCommunicator", 0, None)
            continue
        number = place[:rank].count(place[rank])
        between = len(set(place)) if number < senders else None
        assert found == ("TwoLevelCommunicator", place.count(place[rank]), between)


def use_levels(comm: Any) -> None:
    """Between operations of all ranks, and beside one that is under way."""
    node, between = comm.node, comm.inter_node
    for _ in range(3):
        total, here = np.ones(3), np.ones(4)
        comm.all_reduce(total)
        node.all_reduce(here)
        assert (total[0], here[0]) == (comm.size, node.size)
        if between is not None:
            hosts = np.ones(5)
            work = between.all_reduce(hosts, async_op=True)
            work.wait()
            assert hosts[0] == between.size


def test_levels_are_communicators(pool: RankPool) -> None:
    if len(set(place_of(pool))) < len(place_of(pool)):
        pool.run(use_levels)


def split(comm: Any) -> list[tuple[str, str]]:
    """Return the kinds of the halves, and of the hosts, of a communicator."""
    found = []
    for color in (comm.rank % 2, ord(os.environ["RANK_POOL_HOSTS"][comm.rank])):
        with comm.split(color) as part:
            total = np.ones(3)
            part.all_reduce(total)
            assert total[0] == part.size
            assert part.backend == comm.backend
            found.append(type(part).__name__)
    return found


def test_ranks_of_a_host_use_its_memory_when_they_are_split(pool: RankPool) -> None:
    for _, host in pool.run(split):
        assert host == "ShmCommunicator"


def kinds_if_asked_for(comm: Any, job: str) -> list[str]:
    """Return the kind of communicator where one rank has a wish, which is that of all."""
    found = []
    settings = {"rank": comm.rank, "world_size": comm.size, "timeout": 20}
    for wish in ("no", "1", "0"):
        os.environ["TAGI_DDP_TWO_LEVELS"] = wish if comm.rank == 1 or wish == "no" else ""
        if wish == "no":
            with pytest.raises(ValueError, match="TAGI_DDP_TWO_LEVELS must be"):
                init("gloo", job=f"{job} {wish}", **settings)
            continue
        with init("gloo", job=f"{job} {wish}", **settings) as other:
            found.append(type(other).__name__)
            total = np.ones(5)
            other.all_reduce(total)
            assert (total == comm.size).all()
        comm.barrier()
    os.environ["TAGI_DDP_TWO_LEVELS"] = "1"
    return found


@pytest.mark.parametrize("pool", PLACES[:1], indirect=True, ids="-".join)
def test_the_variable(pool: RankPool) -> None:
    for found in pool.run(kinds_if_asked_for, "the variable"):
        assert found == ["TwoLevelCommunicator", "NetworkCommunicator"]


def kind_of_another_user(comm: Any, job: str) -> tuple[str, bool]:
    """Say that rank 1 belongs to somebody else."""
    own = os.getuid()
    os.getuid = lambda: own + (comm.rank == 1)
    settings = {"rank": comm.rank, "world_size": comm.size, "job": job, "timeout": 20}
    try:
        with warnings.catch_warnings(record=True) as found, init("gloo", **settings) as other:
            total = np.ones(5)
            other.all_reduce(total)
            assert (total == comm.size).all()
            return type(other).__name__, any("several users" in str(w.message) for w in found)
    finally:
        os.getuid = lambda: own


def test_users_share_no_memory() -> None:
    with contextlib.closing(pool_of("gloo", "aab")) as pool:
        found = pool.run(kind_of_another_user, "users")
    assert found == [("NetworkCommunicator", rank == 0) for rank in range(3)]
