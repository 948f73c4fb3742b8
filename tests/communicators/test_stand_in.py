"""The stand-ins for libcuda and libnccl do what the real libraries' public interfaces say."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from stand_in.build import build
from stand_in.client import DTYPES, IN_PROGRESS, Client, run_clients

Libraries = tuple[Path, Path]
SUM, PROD, MAX, MIN, AVG = range(5)
FAULT = "TAGI_DDP_STAND_IN_FAULT"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = tmp_path_factory.mktemp("stand_in")
    return build(folder, omit=["ncclGetErrorString", "cuDeviceTotalMem_v2"])


def operations(c: Client, dtype: str) -> None:
    """Every operation, against what numpy computes from all ranks' data."""
    n, number, comm = 1000, DTYPES[dtype], c.connect()
    inputs = np.random.default_rng(0).normal(0, 3, (c.size, n * c.size)).astype(dtype)
    mine, root = inputs[c.rank].copy(), c.size - 1
    combine = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}
    expected = {op: function.reduce(inputs) for op, function in combine.items()}
    if dtype != "int32":
        expected[AVG] = expected[SUM] * np.array(1 / c.size, dtype)
    for op, total in expected.items():
        out = mine.copy()
        c.run("ncclAllReduce", comm, out, out, mine.size, number, op)
        np.testing.assert_array_equal(out, total)
        out = np.zeros(n, dtype)
        c.run("ncclReduceScatter", comm, mine, out, n, number, op)
        np.testing.assert_array_equal(out, total.reshape(c.size, n)[c.rank])
        out = np.zeros_like(mine)
        c.run("ncclReduce", comm, mine, out, mine.size, number, op, root)
        np.testing.assert_array_equal(out, total if c.rank == root else 0)
    out = np.zeros_like(mine)
    c.run("ncclBroadcast", comm, mine, out, mine.size, number, root)
    np.testing.assert_array_equal(out, inputs[root])
    c.run("ncclAllGather", comm, mine, out, n, number)
    np.testing.assert_array_equal(out, inputs[:, :n].ravel())
    c.run("ncclAlltoAll", comm, mine, out, n, number)
    parts = inputs.reshape(c.size, c.size, n)
    np.testing.assert_array_equal(out, parts[:, c.rank].ravel())
    assert c.settle(c.call("ncclCommFinalize", comm), comm) == 0
    c.check("ncclCommDestroy", comm)
    assert c.call("ncclCommDestroy", comm) == 4


def groups(c: Client) -> None:
    """Two communicators in a group, messages in a ring and to itself, on two streams."""
    count = 300_000  # more than sockets hold
    first, second = c.connect(), c.connect()
    other = c.new("cuStreamCreateWithPriority", 1, -1)
    mine, out = np.full(count, c.rank, "float32"), np.zeros((4, count), "float32")
    left, right = (c.rank - 1) % c.size, (c.rank + 1) % c.size
    for _ in range(4):
        out[:] = -1
        c.check("ncclGroupStart")
        c.check("ncclSend", mine, count, 7, right, first, c.stream)
        c.check("ncclSend", mine, count, 7, c.rank, first, other)
        c.check("ncclAllReduce", mine, out[0], count, 7, SUM, second, c.stream)
        c.check("ncclAllReduce", mine, out[1], count, 7, MAX, first, c.stream)
        c.check("ncclRecv", out[2], count, 7, left, first, c.stream)
        c.check("ncclRecv", out[3], count, 7, c.rank, first, c.stream)
        assert c.settle(c.call("ncclGroupEnd"), first, second) == 0
        c.check("cuStreamSynchronize", other)
        assert (out[1:] == [[c.size - 1], [left], [c.rank]]).all()
        c.check("cuStreamSynchronize", c.stream)
        assert (out[0] == sum(range(c.size))).all()
    assert c.call("ncclGroupEnd") == 5
    c.check("ncclCommDestroy", first)
    c.check("ncclCommDestroy", second)


def streams(c: Client) -> None:
    """What waits for an event comes after it; operations run in the order of their calls."""
    comm, other = c.connect(), c.new("cuStreamCreateWithPriority", 1, -1)
    values, out = np.zeros((2, 20, 8), "float32")
    last = np.zeros(8, "float32")
    for step in range(20):
        ones = np.full(8, step + 1, "float32")
        c.check("cuMemcpyAsync", values[step], ones, ones.nbytes, c.stream)
        c.check("cuStreamWaitEvent", other, c.mark(c.stream), 0)
        assert c.launch("ncclAllReduce", comm, values[step], out[step], 8, 7, SUM, on=other) == 0
        c.check("cuStreamWaitEvent", c.stream, c.mark(other), 0)
        c.check("cuMemcpyAsync", last, out[step], ones.nbytes, c.stream)
        c.check("cuStreamSynchronize", c.stream)
        assert (last == c.size * (step + 1)).all()
    assert not c.pending(c.new("cuEventCreate", 2), 0)  # never recorded

    # Without an order between the streams, the second operation waits for the first all the same.
    signal, third = c.connect(), c.new("cuStreamCreateWithPriority", 1, -1)
    if c.rank == 1:
        c.run("ncclBroadcast", signal, ones, ones, 8, 7, 0)
    large, function = np.ones(100_000, "float32"), "ncclRecv" if c.rank == 1 else "ncclSend"
    assert c.launch(function, comm, large, large.size, 7, 1 - c.rank) == 0
    assert c.launch("ncclAllReduce", comm, last, last, 8, 7, SUM, on=other) == 0
    sent, reduced = c.mark(c.stream), c.mark(other)
    if c.rank == 0:  # too large to be sent before it is received
        assert c.pending(sent, 0.1)
        assert c.pending(reduced, 0)
        assert c.launch("ncclBroadcast", signal, ones, ones, 8, 7, 0, on=third) == 0
    assert not c.pending(reduced, 5)
    assert not c.pending(sent, 5)
    c.check("ncclCommDestroy", comm)
    c.check("cuStreamDestroy_v2", other)
    assert c.call("cuStreamSynchronize", other) == 400


# What ranks 0 and 1 see after a fault: the state, and whether what was started does not end.
FAULTS = {
    "=2": [(2, False), (2, False)],
    "=2@1": [(0, True), (2, False)],
    ":hang": [(0, True), (0, True)],
    ":async=6@1": [(0, True), (6, True)],
    ":progress": [(IN_PROGRESS, False), (IN_PROGRESS, False)],
}


def faulty(c: Client, fault: str, call: int) -> None:
    """Two operations, of which one fails."""
    values, (expected, hangs) = np.ones(8, "float32"), FAULTS[fault][c.rank]
    arguments = (values, values, 8, 7, SUM)
    comm, codes = c.connect(), [0]
    os.environ[FAULT] = f"ncclAllReduce{fault}#{call}"
    while codes[-1] == 0 and len(codes) < 3:
        limit = 0.1 if len(codes) == call and expected == IN_PROGRESS else 5
        codes.append(c.launch("ncclAllReduce", comm, *arguments, limit=limit))
    os.environ[FAULT] = ""
    event = c.mark(c.stream)
    assert c.pending(event, 0.1 if hangs else 5) == hangs
    assert codes[-1] == expected or c.until(lambda: c.state(comm) == expected, 5)
    if expected == IN_PROGRESS:
        assert c.launch("ncclAllReduce", comm, *arguments) == 5
    start = time.monotonic()
    c.check("ncclCommAbort", comm)
    assert not c.pending(event, 5)
    assert time.monotonic() - start < 2


def faults(c: Client) -> None:
    for fault in FAULTS:
        faulty(c, fault, 1)
        faulty(c, fault, 2)


def hangs(c: Client, fault: str) -> None:
    comm, values = c.connect(), np.ones(8, "float32")
    os.environ[FAULT] = fault
    if fault and c.rank == 1:
        os._exit(1)
    assert c.launch("ncclAllReduce", comm, values, values, 8, 7, MAX if c.rank else MIN) == 0
    event = c.mark(c.stream)
    assert c.pending(event, 0.1)
    assert c.until(lambda: c.state(comm) == (6 if fault else 0), 5)
    c.check("ncclCommAbort", comm)
    assert not c.pending(event, 1)


def other_faults(c: Client) -> None:
    """Faults of the start, of versions and of the driver."""
    for fault, code in ((":hang", IN_PROGRESS), (":async=2", 2), ("=3", 3)):
        os.environ[FAULT] = f"ncclCommInitRankConfig{fault}"
        begun, comm = c.begin()
        assert c.settle(begun, comm, limit=0.1 if fault == ":hang" else 5) == code
        assert c.nccl.ncclGetLastError(None) == b"stand-in: injected in ncclCommInitRankConfig"
        if begun == IN_PROGRESS:
            c.check("ncclCommAbort", comm)
    os.environ[FAULT] = "ncclGetVersion:value=21403#2,cuEventQuery=700@1#3,cuInit=999"
    version, context, event = ctypes.c_int(), ctypes.c_void_p(), c.new("cuEventCreate", 2)
    for expected in (22807, 21403):
        c.check("ncclGetVersion", ctypes.byref(version))
        assert version.value == expected
    assert [c.call("cuEventQuery", event) for _ in range(3)] == [0, 0, 700 * c.rank]
    assert c.call("cuInit", 0) == 999
    c.check("cuCtxPopCurrent_v2", ctypes.byref(context))
    assert c.call("cuStreamSynchronize", c.stream) == 201
    os.environ[FAULT] = ""
    assert c.begin()[0] == 1  # without a context
    assert not hasattr(c.nccl, "ncclGetErrorString")  # left out of the build
    assert not hasattr(c.cuda, "cuDeviceTotalMem_v2")


@pytest.mark.parametrize("dtype", ["int32", "float16"])
@pytest.mark.parametrize("size", [2, 4])
def test_operations(libraries: Libraries, size: int, dtype: str) -> None:
    run_clients(libraries, size, operations, dtype)


@pytest.mark.parametrize(("fault", "dying"), [("", None), ("remote", 1)])
def test_ranks_that_differ_or_die(libraries: Libraries, fault: str, dying: int | None) -> None:
    run_clients(libraries, 2, hangs, fault, dying=dying)


@pytest.mark.parametrize(
    ("size", "function"), [(2, groups), (4, groups), (2, streams), (2, faults), (2, other_faults)]
)
def test_behaviour(libraries: Libraries, size: int, function: Callable[[Client], None]) -> None:
    run_clients(libraries, size, function)
