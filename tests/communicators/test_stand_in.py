"""The stand-ins for libcuda and libnccl do what the real libraries' public interfaces say."""

from __future__ import annotations

import ctypes
import os
import time
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


def data(rank: int, count: int, dtype: str) -> np.ndarray:
    return (np.random.default_rng(rank).normal(0, 3, count)).astype(dtype)


def operations(c: Client, dtype: str) -> None:
    """Every operation, against what numpy computes from all ranks' data."""
    n, number, comm, others = 1000, DTYPES[dtype], c.connect(), range(c.size)
    inputs = np.stack([data(rank, n * c.size, dtype) for rank in others])
    mine, root = inputs[c.rank].copy(), c.size - 1
    expected = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}
    for op, combine in expected.items():
        expected[op] = combine.reduce(inputs)
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


@pytest.mark.parametrize("dtype", ["int32", "float16"])
@pytest.mark.parametrize("size", [2, 4])
def test_operations(libraries: Libraries, size: int, dtype: str) -> None:
    run_clients(libraries, size, operations, dtype)


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
        for stream in (c.stream, other):
            c.check("cuStreamSynchronize", stream)
        for row, value in zip(out, (sum(range(c.size)), c.size - 1, left, c.rank), strict=True):
            assert (row == value).all()
    assert c.call("ncclGroupEnd") == 5
    for comm in (first, second):
        c.check("ncclCommDestroy", comm)


@pytest.mark.parametrize("size", [2, 4])
def test_groups(libraries: Libraries, size: int) -> None:
    run_clients(libraries, size, groups)


def streams(c: Client) -> None:
    """What waits for an event comes after it; operations run in the order of their calls."""
    comm, other = c.connect(), c.new("cuStreamCreateWithPriority", 1, -1)
    steps = np.zeros((41, 8), "float32")
    for step in range(20):
        ones = np.full(8, step + 1, "float32")
        c.check("cuMemcpyAsync", steps[2 * step], ones, ones.nbytes, c.stream)
        c.check("cuStreamWaitEvent", other, c.mark(c.stream), 0)
        arguments = (steps[2 * step], steps[2 * step + 1], 8, 7, SUM, comm, other)
        assert c.settle(c.call("ncclAllReduce", *arguments), comm) == 0
        c.check("cuStreamWaitEvent", c.stream, c.mark(other), 0)
        c.check("cuMemcpyAsync", steps[40], steps[2 * step + 1], ones.nbytes, c.stream)
        c.check("cuStreamSynchronize", c.stream)
        assert (steps[40] == c.size * (step + 1)).all()
    event = c.new("cuEventCreate", 2)
    assert not c.pending(event, 0)  # never recorded
    # Without an order between the streams: the second waits for the first all the same.
    late, early = np.ones(100_000, "float32"), np.ones(8, "float32")
    if c.rank == 1:
        time.sleep(0.3)
    transfer = "ncclRecv" if c.rank == 1 else "ncclSend"
    assert c.launch(transfer, comm, late, late.size, 7, 1 - c.rank) == 0
    arguments = (early, early, 8, 7, SUM, comm, other)
    assert c.settle(c.call("ncclAllReduce", *arguments), comm) == 0
    sent, reduced = c.mark(c.stream), c.mark(other)
    if c.rank == 0:  # too large to be sent before it is received
        assert c.pending(sent, 0.1)
        assert c.pending(reduced, 0)
    assert not c.pending(reduced, 5)
    assert not c.pending(sent, 0)
    c.check("ncclCommDestroy", comm)
    c.check("cuStreamDestroy_v2", other)
    assert c.call("cuStreamSynchronize", other) == 400


def test_streams(libraries: Libraries) -> None:
    run_clients(libraries, 2, streams)


def state_after(c: Client, fault: str) -> tuple[int, bool]:
    """The state after up to two operations, and whether what was started does not end."""
    values = np.ones(8, "float32")
    os.environ[FAULT] = ""
    comm = c.connect()
    os.environ[FAULT] = fault
    code = 0
    for _ in range(2):
        if code == 0:
            code = c.call("ncclAllReduce", values, values, 8, 7, SUM, comm, c.stream)
            code = c.settle(code, comm, limit=0.1)
    os.environ[FAULT] = ""
    event = c.mark(c.stream)
    pending = c.pending(event, 0.1)
    code = c.state(comm) if code == 0 else code
    if code == IN_PROGRESS:
        assert c.launch("ncclAllReduce", comm, values, values, 8, 7, SUM) == 5
    start = time.monotonic()
    c.check("ncclCommAbort", comm)
    assert not c.pending(event, 1)
    assert time.monotonic() - start < 1
    return code, pending


# What the ranks of `state_after` report.
FAULTS = {
    "=2": [(2, False), (2, False)],
    "=2@1": [(0, True), (2, False)],
    ":hang": [(0, True), (0, True)],
    ":async=6@1": [(0, True), (6, True)],
    ":progress": [(IN_PROGRESS, False), (IN_PROGRESS, False)],
}


def test_faults_of_operations(libraries: Libraries) -> None:
    faults = [f"ncclAllReduce{fault}#{call}" for fault in FAULTS for call in (1, 2)]
    results = run_clients(libraries, 2, lambda c: [state_after(c, fault) for fault in faults])
    expected = [FAULTS[fault.removeprefix("ncclAllReduce")[:-2]] for fault in faults]
    for fault, states, values in zip(faults, zip(*results, strict=True), expected, strict=True):
        assert list(states) == values, fault


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


@pytest.mark.parametrize(("fault", "dying"), [("", None), ("remote", 1)])
def test_ranks_that_differ_or_die(libraries: Libraries, fault: str, dying: int | None) -> None:
    run_clients(libraries, 2, hangs, fault, dying=dying)


def other_faults(c: Client) -> None:
    """Faults of the start, of versions and of the driver."""
    for fault, code in (("=3", 3), (":hang", IN_PROGRESS), (":async=2", 2)):
        os.environ[FAULT] = f"ncclCommInitRankConfig{fault}"
        begun, comm = c.begin()
        assert c.settle(begun, comm, limit=0.1) == code
        if fault != "=3":
            c.check("ncclCommAbort", comm)
        last = b"stand-in: injected in ncclCommInitRankConfig"
        assert c.nccl.ncclGetLastError(None) == last
    version = ctypes.c_int()
    for fault, expected in (("", 22807), ("ncclGetVersion:value=21403", 21403)):
        os.environ[FAULT] = fault
        c.check("ncclGetVersion", ctypes.byref(version))
        assert version.value == expected
    os.environ[FAULT] = "ncclGetVersion=2,cuEventQuery=700@1#3,cuCtxPushCurrent_v2=999"
    event = c.new("cuEventCreate", 2)
    assert [c.call("cuEventQuery", event) for _ in range(3)] == [0, 0, 700 * c.rank]
    assert c.call("ncclGetVersion", ctypes.byref(version)) == 2
    context = ctypes.c_void_p()
    c.check("cuCtxPopCurrent_v2", ctypes.byref(context))
    assert c.call("cuStreamSynchronize", c.stream) == 201
    assert c.call("cuCtxPushCurrent_v2", context) == 999
    os.environ[FAULT] = ""
    assert c.begin()[0] == 1
    c.check("cuCtxPushCurrent_v2", context)
    assert not hasattr(c.nccl, "ncclGetErrorString")  # left out of the build
    assert not hasattr(c.cuda, "cuDeviceTotalMem_v2")


def test_other_faults(libraries: Libraries) -> None:
    run_clients(libraries, 2, other_faults)
