"""Every operation, dtype, root and way to share elements, against numpy."""

from __future__ import annotations

import hashlib
import itertools
import time
import warnings
from typing import Any

import numpy as np
import pytest
from contract.data import (
    COUNTS,
    DTYPES,
    FLOATS,
    bits,
    check_equal,
    check_reduced,
    concatenate,
    empty,
    make,
    ops,
    tensor,
)
from support.rank_pool import RankPool


def all_reduce(comm: Any, dtype: str) -> str:
    digest = hashlib.sha256()
    for count in COUNTS:
        for op in ops(dtype):
            inputs = [make(dtype, count, rank) for rank in range(comm.size)]
            mine, out = inputs[comm.rank], empty(dtype, count)
            before = bits(mine)
            assert comm.all_reduce(mine, op, out=out) is None
            assert bits(mine) == before, "the input was written to"
            check_reduced(out, inputs, op, dtype)
            in_place = make(dtype, count, comm.rank)
            comm.all_reduce(in_place, op)
            check_equal(in_place, out)
            digest.update(bits(out))
    return digest.hexdigest()


def accumulate_in_32_bits(comm: Any, dtype: str, big: float) -> None:
    """In 16 bits big + 1 is big again, so that only a wider sum gets the ones of two ranks.

    Two is the distance of the next number; a tie goes to the even one.
    """
    buffer = tensor([big if comm.rank == 0 else 1.0] * 9, dtype)
    comm.all_reduce(buffer)
    ones = {1: 0, 2: 0, 3: 2, 4: 4}[comm.size]
    assert buffer.double().tolist() == [big + ones] * 9


def non_finite(comm: Any, dtype: str) -> bytes:
    results = b""
    for op, count in itertools.product(ops(dtype), (7, 6000)):
        buffer = np.ones(count, dtype)
        buffer[comm.rank] = np.nan
        buffer[4] = np.inf if comm.rank == 0 else -np.inf
        buffer[5] = np.inf if comm.rank == 0 else 1
        buffer[6] = np.finfo(dtype).max
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.all_reduce(buffer, op)
        if op == "sum":
            assert np.isnan(buffer[: comm.size]).all()
            assert np.isnan(buffer[4]) == (comm.size > 1)
            assert buffer[5] == np.inf
            assert np.isinf(buffer[6]) == (comm.size > 1)
        results += buffer.tobytes()
    return results


def broadcast(comm: Any, dtype: str) -> None:
    for count in COUNTS:
        for root in range(comm.size):
            expected = make(dtype, count, root)
            buffer = make(dtype, count, comm.rank)
            assert comm.broadcast(buffer, root) is None
            check_equal(buffer, expected)


def shares(size: int) -> list[list[int] | None]:
    """Return ways to share elements: equal, uneven, with ranks that have none, all on one rank."""
    return [
        None,
        [3 + rank for rank in range(size)],
        [300 + rank for rank in range(size)],
        [(rank % 2) * 5 for rank in range(size)],
        [70_001 if rank == size - 1 else 0 for rank in range(size)],
        [0] * size,
    ]


def all_gather(comm: Any, dtype: str) -> None:
    for counts in shares(comm.size):
        sizes = counts or [11] * comm.size
        inputs = [make(dtype, count, rank) for rank, count in enumerate(sizes)]
        before = bits(inputs[comm.rank])
        out = empty(dtype, sum(sizes))
        assert comm.all_gather(inputs[comm.rank], out, counts) is None
        check_equal(out, concatenate(inputs))
        assert bits(inputs[comm.rank]) == before, "the input was written to"


def reduce_scatter(comm: Any, dtype: str) -> None:
    for counts in shares(comm.size):
        sizes = counts or [11] * comm.size
        inputs = [make(dtype, sum(sizes), rank) for rank in range(comm.size)]
        before = bits(inputs[comm.rank])
        start = sum(sizes[: comm.rank])
        mine = slice(start, start + sizes[comm.rank])
        for op in ops(dtype):
            out = empty(dtype, sizes[comm.rank])
            assert comm.reduce_scatter(inputs[comm.rank], out, counts, op) is None
            check_reduced(out, [buffer[mine] for buffer in inputs], op, dtype)
        assert bits(inputs[comm.rank]) == before, "the input was written to"


def own_memory(comm: Any, dtype: str) -> None:
    """Work in memory that the communicator gives, in all of it and in a part."""
    for count, begin in ((0, 0), (9, 2), (30_001, 5)):
        own = comm.empty((count,), dtype)
        assert (own.dtype, own.shape) == (np.dtype(dtype), (count,))
        assert not own.any()
        inputs = [make(dtype, count, rank) for rank in range(comm.size)]
        mine, part = inputs[comm.rank], slice(begin, count)
        for op in ops(dtype):
            own[:] = mine
            comm.all_reduce(own[part], op)
            check_reduced(own[part], [each[part] for each in inputs], op, dtype)
            check_equal(own[:begin], mine[:begin])
        counts = [count // comm.size + (rank < count % comm.size) for rank in range(comm.size)]
        end = sum(counts[: comm.rank + 1])
        share = slice(end - counts[comm.rank], end)
        own[:], out = mine, empty(dtype, counts[comm.rank])
        comm.reduce_scatter(own, out, counts)
        check_reduced(out, [each[share] for each in inputs], "sum", dtype)
        check_equal(own, mine)
        comm.all_gather(inputs[0][share].copy(), own, counts)
        check_equal(own, inputs[0])


def all_to_all(comm: Any, dtype: str) -> None:
    size, rank = comm.size, comm.rank
    tables = [
        np.full((size, size), 4),
        np.arange(size * size).reshape(size, size),
        np.eye(size, dtype=int) * 5,
        np.zeros((size, size), int),
    ]
    tables.append(tables[1] * 1000)
    for number, table in enumerate(tables):
        inputs = [make(dtype, int(row.sum()), seed) for seed, row in enumerate(table)]
        before = bits(inputs[rank])
        parts = []
        for row, buffer in zip(table, inputs, strict=True):
            start = int(row[:rank].sum())
            parts.append(buffer[start : start + int(row[rank])])
        out = empty(dtype, int(table[:, rank].sum()))
        if number == 0:
            comm.all_to_all(inputs[rank], out)
        else:
            comm.all_to_all(inputs[rank], out, table[rank].tolist(), table[:, rank].tolist())
        check_equal(out, concatenate(parts))
        assert bits(inputs[rank]) == before, "the input was written to"


def messages(comm: Any, dtype: str) -> None:
    for count in COUNTS:
        for src in range(comm.size):
            for dst in range(comm.size):
                if src == dst:
                    continue
                first, second = make(dtype, count, src), make(dtype, count, 10 + src)
                if comm.rank == src:
                    assert comm.send(first, dst, tag=7) is None
                    comm.send(second, dst, tag=dst)
                elif comm.rank == dst:
                    for expected, tag in ((first, 7), (second, dst)):
                        buffer = empty(dtype, count)
                        assert comm.recv(buffer, src, tag) is None
                        check_equal(buffer, expected)


def barrier(comm: Any) -> tuple[float, float]:
    time.sleep(0.1 * comm.rank)
    entered = time.monotonic()
    comm.barrier()
    return entered, time.monotonic()


def reduce_shapes(comm: Any) -> None:
    scalar, matrix = np.array(2.0), np.ones((2, 3, 4), np.float32)
    comm.all_reduce(scalar)
    assert scalar == 2.0 * comm.size
    comm.all_reduce(matrix[1])  # a contiguous part
    assert (matrix[0] == 1).all()
    assert (matrix[1] == comm.size).all()


def tensors(comm: Any) -> None:
    parameter = tensor([[1.0, 2.0]], "float32").requires_grad_()
    where = parameter.data_ptr()
    comm.all_reduce(parameter)
    assert parameter.data_ptr() == where
    assert parameter.tolist() == [[comm.size, 2.0 * comm.size]]
    out = np.zeros(2, np.float32)  # both kinds in one call
    comm.all_reduce(tensor([1.0, 3.0], "float32"), "max", out=out)
    assert out.tolist() == [1.0, 3.0]


def large(comm: Any) -> str:
    buffer = np.arange(3_000_001, dtype=np.float32) % 1000 * (comm.rank + 1)
    comm.all_reduce(buffer)
    factor = comm.size * (comm.size + 1) // 2
    assert np.array_equal(buffer, np.arange(3_000_001) % 1000 * factor)
    return hashlib.sha256(buffer.tobytes()).hexdigest()


def properties(comm: Any) -> tuple[int, int, str, str, float]:
    return comm.rank, comm.size, comm.backend, comm.device, comm.timeout


class OperationsContract:
    """Each test runs at every number of ranks of the backend."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_all_reduce(self, pool: RankPool, size: int, dtype: str) -> None:
        assert len(set(pool.run(all_reduce, dtype, size=size))) == 1, "results differ in bits"

    @pytest.mark.parametrize(("dtype", "big"), [("float16", 2048.0), ("bfloat16", 256.0)])
    def test_16_bits_accumulate_in_32(
        self, pool: RankPool, size: int, dtype: str, big: float
    ) -> None:
        pool.run(accumulate_in_32_bits, dtype, big, size=size)

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_not_finite(self, pool: RankPool, size: int, dtype: str) -> None:
        assert len(set(pool.run(non_finite, dtype, size=size))) == 1, "results differ in bits"

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_broadcast(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(broadcast, dtype, size=size)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_all_gather(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(all_gather, dtype, size=size)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reduce_scatter(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(reduce_scatter, dtype, size=size)

    @pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
    def test_own_memory(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(own_memory, dtype, size=size)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_all_to_all(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(all_to_all, dtype, size=size)

    @pytest.mark.parametrize("dtype", [*FLOATS, "int8", "int64"])
    def test_messages(self, pool: RankPool, size: int, dtype: str) -> None:
        pool.run(messages, dtype, size=size)

    def test_barrier(self, pool: RankPool, size: int) -> None:
        entered, left = zip(*pool.run(barrier, size=size), strict=True)
        assert max(entered) <= min(left)

    def test_shapes(self, pool: RankPool, size: int) -> None:
        pool.run(reduce_shapes, size=size)

    def test_tensors(self, pool: RankPool, size: int) -> None:
        pool.run(tensors, size=size)

    def test_large(self, pool: RankPool, size: int) -> None:
        assert len(set(pool.run(large, size=size))) == 1

    def test_properties(self, pool: RankPool, size: int) -> None:
        shared = pool.settings("").get("device")  # ranks that are more than the GPUs share one
        devices = [f"cuda:{rank}" if pool.backend == "nccl" else "cpu" for rank in range(size)]
        expected = [
            (rank, size, pool.backend, shared or devices[rank], 20.0) for rank in range(size)
        ]
        assert pool.run(properties, size=size) == expected
