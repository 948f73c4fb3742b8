"""Asynchronous operations, several communicators at once, and parts of a group."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.data import announce, await_ranks, caught
from support.on_device import init
from support.rank_pool import RankPool

from tagi_ddp.communicators import Communicator, Timeout, Work, all_gather_object


def chain(comm: Any, dtype: str) -> None:
    """Each operation takes the result of the one before; only the last is waited for."""
    rank, size = comm.rank, comm.size
    buffer = np.full(1000, rank + 1, dtype)
    gathered, slices = np.empty(1000 * size, dtype), np.empty(1000, dtype)
    works = [
        comm.all_reduce(buffer, async_op=True),
        comm.broadcast(buffer, size - 1, async_op=True),
        comm.all_gather(buffer, gathered, async_op=True),
        comm.reduce_scatter(gathered, slices, async_op=True),
        comm.all_to_all(slices, buffer, *[[1000 if r == rank else 0 for r in range(size)]] * 2)
        or comm.all_reduce(buffer, "max", async_op=True),
    ]
    assert all(isinstance(work, Work) for work in works)
    works[-1].wait()
    assert all(work.done() for work in works)
    for work in works:
        work.wait()  # again and again
    assert (buffer == size * (size + 1) / 2 * size).all()


def many_in_flight(comm: Any, dtype: str) -> None:
    arrays = [np.full(1 + 997 * i, comm.rank + i, dtype) for i in range(40)]
    works = [comm.all_reduce(array, async_op=True) for array in arrays]
    blocking = np.ones(1)
    comm.all_reduce(blocking)  # behind all the others
    assert all(work.done() for work in works)
    for i, array in enumerate(arrays):
        assert (array == sum(rank + i for rank in range(comm.size))).all()


def pending(comm: Any, folder: Path) -> None:
    """A wait may end before the operation does, which goes on."""
    if comm.rank == 0:
        buffer = np.ones(5)
        work = comm.all_reduce(buffer, async_op=True)
        assert not work.done()
        started = time.monotonic()
        error = caught(lambda: work.wait(timeout=0.2))
        assert isinstance(error, Timeout), error
        assert time.monotonic() - started > 0.15
        announce(folder, 0)
        assert "all_reduce #1" in str(error), error
        work.wait()
        assert buffer[0] == comm.size
    else:
        await_ranks(folder, [0])
        comm.all_reduce(np.ones(5))


def exchange(comm: Any) -> None:
    """All send before any receives, or the other way round; more than what lies on the way."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (100, 200_000):
        sent = [np.full(count, 10 * comm.rank + i) for i in (0, 1)]
        works = [comm.send(array, after, i, async_op=True) for i, array in enumerate(sent)]
        for i in (0, 1):
            buffer = np.zeros(count, int)
            comm.recv(buffer, before, i, async_op=True).wait()
            assert (buffer == 10 * before + i).all()
        comes = comm.recv(buffer, before, async_op=True)
        works.append(comm.send(sent[0], after, async_op=True))
        for work in (*works, comes):
            work.wait()
        assert (buffer == 10 * before).all()


def two_at_once(comm: Any, settings: dict[str, Any]) -> None:
    """Each makes progress while the other waits, whatever the order between the two."""
    with init(**{**settings, "rank": comm.rank, "world_size": comm.size}) as second:
        # Tests on GPUs wrap communicators, and both must take the host's buffers.
        assert type(second).__name__ == type(comm).__name__
        one, two = np.full(10, 1.0), np.full(10, 2.0)
        calls = [lambda: comm.all_reduce(one, async_op=True)]
        calls.append(lambda: second.all_reduce(two, async_op=True))
        works = [call() for call in (calls if comm.rank % 2 else calls[::-1])]
        for work in works:
            work.wait()
        assert one[0] == comm.size
        assert two[0] == 2 * comm.size
    comm.barrier()


def gather_objects(comm: Any) -> None:
    gathered = all_gather_object(comm, {"rank": comm.rank, "text": "x" * comm.rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(comm.size)]


def objects_beside_others(comm: Any) -> None:
    """Gather objects, and split, while no rank has waited yet for the all_reduces that it began."""
    for _ in range(5):
        arrays = [np.full(5000, comm.rank, np.float32) for _ in range(3)]
        works = [comm.all_reduce(array, async_op=True) for array in arrays]
        gather_objects(comm)
        comm.split(None)
        for work, array in zip(works, arrays, strict=True):
            work.wait()
            assert (array == sum(range(comm.size))).all()


def split_by_parity(comm: Any) -> None:
    """Ranks in reverse order by key; the parts work beside the whole."""
    part = comm.split(comm.rank % 2, -comm.rank)
    members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    assert isinstance(part, Communicator)
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    assert part.timeout == comm.timeout
    with part:
        for _ in range(3):
            own, whole = np.full(2000, comm.rank), np.full(2000, comm.rank)
            part.all_reduce(own)
            comm.all_reduce(whole)
            assert (own == sum(members)).all()
            assert (whole == sum(range(comm.size))).all()
        gathered = np.empty(part.size, np.int64)
        part.all_gather(np.array([comm.rank]), gathered)
        assert gathered.tolist() == members
    comm.barrier()


def split_in_parts(comm: Any) -> None:
    """None belongs to no part, equal keys keep the order, and parts can be split again."""
    assert comm.split(None) is None
    same = comm.split(3)
    assert (same.rank, same.size) == (comm.rank, comm.size)
    but_first = same.split(None if same.rank == 0 else 0, 5)
    assert (but_first is None) == (same.rank == 0)
    same.close()
    if but_first is not None:
        alone = but_first.split(but_first.rank)
        assert (alone.rank, alone.size) == (0, 1)
        total = np.ones(1)
        alone.all_reduce(total)
        assert total == 1
        alone.barrier()
        alone.close()
        but_first.all_reduce(total)
        assert total == comm.size - 1
        if but_first.size > 1:
            if but_first.rank == 0:
                but_first.send(total, 1)
            elif but_first.rank == 1:
                but_first.recv(total, 0)
        but_first.close()
    comm.barrier()


class OrderContract:
    """At every number of ranks."""

    @pytest.mark.parametrize("dtype", ["float64", "float16"])
    def test_chain_of_operations(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(chain, dtype, size=size)

    @pytest.mark.parametrize("dtype", ["int64", "int16"])
    def test_many_in_flight(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(many_in_flight, dtype, size=size)

    def test_two_at_once(self, pool: RankPool, size: int) -> None:
        settings = pool.settings(f"{size} ranks, second")
        pool.run(two_at_once, settings, size=size)

    def test_objects(self, pool: RankPool, size: int) -> None:
        pool.run(gather_objects, size=size)

    def test_objects_beside_others(self, pool: RankPool, size: int) -> None:
        pool.run(objects_beside_others, size=size, timeout=5)


class GroupContract:
    """At every number of ranks from 2 on."""

    def test_wait_with_a_limit(self, pool: RankPool, size: int, tmp_path: Path) -> None:
        pool.run(pending, tmp_path, size=size, fresh=True)

    def test_exchange(self, pool: RankPool, size: int) -> None:
        pool.run(exchange, size=size)

    def test_split_by_parity(self, pool: RankPool, size: int) -> None:
        pool.run(split_by_parity, size=size)

    def test_split_in_parts(self, pool: RankPool, size: int) -> None:
        pool.run(split_in_parts, size=size)
