"""Programs of the stand-ins' clients, without faults."""

from __future__ import annotations

import numpy as np
from support.stand_in.client import DTYPES, Client

SUM, PROD, MAX, MIN, AVG = range(5)


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
    """Check that work waits for events, and that operations run in the order of their calls."""
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

    signal, third = c.connect(), c.new("cuStreamCreateWithPriority", 1, -1)

    def wait_for_root() -> None:
        assert c.launch("ncclBroadcast", signal, ones, ones, 8, 7, 0, on=third) == 0
        assert not c.pending(c.mark(third), 5)

    # Without an order between the streams, the second operation waits for the first all the same.
    if c.rank == 1:
        wait_for_root()
    large, function = np.full(100_000, c.rank), "ncclRecv" if c.rank == 1 else "ncclSend"
    assert c.launch(function, comm, large, large.nbytes, 0, 1 - c.rank) == 0
    assert c.launch("ncclAllReduce", comm, last, last, 8, 7, SUM, on=other) == 0
    sent, reduced = c.mark(c.stream), c.mark(other)
    if c.rank == 0:  # too large to be sent before it is received
        assert c.pending(sent, 0.1)
        assert c.pending(reduced, 0)
        wait_for_root()
    assert not c.pending(reduced, 5)
    assert not c.pending(sent, 5)
    assert (large == 0).all()

    # An abort ends what waits for a rank that does not come.
    if c.rank == 0:
        assert c.launch("ncclAllReduce", comm, last, last, 8, 7, SUM) == 0
        assert c.pending(reduced := c.mark(c.stream), 0.1)
        c.check("ncclCommAbort", comm)
        assert not c.pending(reduced, 2)
    wait_for_root()
    c.check("cuStreamDestroy_v2", other)
    assert c.call("cuStreamSynchronize", other) == 400
