"""The memory of the shared-memory communicator: its arrays, its privacy, and that none is left."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.data import caught
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rank_pool import Died, RankPool

from tagi_ddp import Mismatch

DTYPES = ("float16", "float32", "float64", "int8", "uint16", "int32", "int64", "uint64")
OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def data(rank: int, count: int, dtype: str) -> np.ndarray:
    return np.random.default_rng((rank, count)).integers(0, 20, count).astype(dtype)


def reduce_own(comm: Any, count: int, first: int, dtype: str, op: str) -> tuple[np.ndarray, bool]:
    """Reduce from element ``first`` on, in the communicator's memory and outside of it."""
    own = comm.empty(count, dtype)
    zero = not own.any()
    own[:] = data(comm.rank, count, dtype)
    private = own[first:].copy()
    comm.all_reduce(own[first:], op)
    comm.all_reduce(private, op)
    untouched = (own[:first] == data(comm.rank, count, dtype)[:first]).all()
    return own[first:].copy(), bool(zero and untouched and (own[first:] == private).all())


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.integers(2, 4),
    count=st.integers(0, 100_000),
    skip=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(OPS)),
)
def test_reduction_in_own_memory(
    shm: RankPool, size: int, count: int, skip: float, dtype: str, op: str
) -> None:
    first = int(skip * count)
    answers = shm.run(reduce_own, count, first, dtype, op, size=size, fresh=True)
    expected = data(0, count, dtype)
    for rank in range(1, size):
        expected = OPS[op](expected, data(rank, count, dtype))
    for result, well in answers:
        assert well
        np.testing.assert_array_equal(result, expected[first:])


def use_own_arrays(comm: Any) -> list[Any]:
    array = comm.empty((3, 4), np.float64)
    scalar = comm.empty((), "int32")
    comm.all_reduce(scalar)
    kept = comm.empty(5)
    kept[:] = comm.rank
    comm.all_reduce(kept, "mean")
    comm.close()  # the arrays outlive the communicator
    kept += 1
    return [array.shape, array.dtype.name, scalar.shape, kept.tolist()]


def test_arrays(shm: RankPool) -> None:
    for answer in shm.run(use_own_arrays, size=2, fresh=True):
        assert answer == [(3, 4), "float64", (), [1.5] * 5]


def different_places(comm: Any, way: str) -> type:
    array = comm.empty(100)
    if way == "offset":
        buffer = array[comm.rank : 50 + comm.rank]
    elif way == "memory":
        buffer = array[:50] if comm.rank == 0 else np.zeros(50, np.float32)
    else:
        return type(caught(lambda: comm.empty(100 + comm.rank)))
    return type(caught(lambda: comm.all_reduce(buffer)))


@pytest.mark.parametrize("way", ["offset", "memory", "size"])
def test_places_that_differ(shm: RankPool, way: str) -> None:
    assert shm.run(different_places, way, size=2, fresh=True) == [Mismatch, Mismatch]


def too_much(comm: Any) -> str:
    try:
        comm.empty(1 << 50, np.uint8)
    except MemoryError:
        return "MemoryError"
    return "no error"


def test_more_than_the_host_has(shm: RankPool) -> None:
    assert shm.run(too_much, size=2, fresh=True) == ["MemoryError"] * 2


def mappings(comm: Any) -> list[tuple[str, int]]:
    """Return name and permissions of every file of ours that this process has mapped."""
    comm.barrier()
    descriptors = Path("/proc/self/fd").iterdir()
    files = [(os.readlink(entry), os.stat(entry)) for entry in descriptors if entry.exists()]
    return [(name, stat.S_IMODE(status.st_mode)) for name, status in files if "tagi_ddp" in name]


def test_memory_is_private_and_nameless(shm: RankPool) -> None:
    before = set(os.listdir("/dev/shm"))
    for ours in shm.run(mappings, size=2, fresh=True):
        assert ours
        assert all(entry == ("/memfd:tagi_ddp (deleted)", 0o600) for entry in ours)
    assert set(os.listdir("/dev/shm")) <= before


def die_with_memory(comm: Any) -> None:
    comm.empty(1 << 20)
    comm.barrier()
    os.kill(os.getpid(), 9)


def socket_names() -> set[str]:
    names = Path("/proc/net/unix").read_text().split()
    return {name for name in names if name.startswith("@tagi_ddp/")}


def test_nothing_is_left_when_all_are_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    names = socket_names()
    pool = RankPool("shm", 3)
    answers = pool.run(die_with_memory, dying=range(3))
    pool.close()
    assert all(isinstance(answer, Died) for answer in answers)
    assert set(os.listdir("/dev/shm")) <= before
    left = socket_names() - names
    deadline = time.monotonic() + 20  # other tests' groups come together within that
    while (left := left & socket_names()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
