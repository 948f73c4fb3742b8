"""Wrong arguments: each raises at once, names the argument, and does no harm to the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract.data import caught, tensor, tensor_of
from support.rank_pool import RankPool


def zeros(count: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(count, dtype)


def read_only() -> np.ndarray:
    array = zeros(4)
    array.flags.writeable = False
    return array


def misaligned() -> np.ndarray:
    return np.zeros(18, np.uint8)[2:].view(np.float32)


def overlapping(comm: Any) -> Any:
    memory = zeros(6)
    return comm.all_reduce(memory[:4], out=memory[2:])


# Per case: what the text must hold, and the call, whose error is a TypeError or ValueError.
CASES: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "list": (("buffer", "list"), lambda c: c.all_reduce([1.0, 2.0])),
    "none": (("buffer", "None"), lambda c: c.broadcast(None)),
    "complex": (("buffer",), lambda c: c.all_reduce(zeros(3, "complex64"))),
    "bool": (("buffer",), lambda c: c.all_reduce(zeros(3, "bool"))),
    "swapped bytes": (("buffer",), lambda c: c.all_reduce(zeros(3, ">f4"))),
    "strided array": (("buffer", "contiguous"), lambda c: c.all_reduce(zeros(6)[::2])),
    "transposed array": (
        ("buffer", "contiguous"),
        lambda c: c.all_reduce(zeros(6).reshape(2, 3).T),
    ),
    "strided tensor": (
        ("buffer", "contiguous"),
        lambda c: c.all_reduce(tensor([1.0, 2.0, 3.0], "float32")[::2]),
    ),
    "strided out": (("out", "contiguous"), lambda c: c.all_reduce(zeros(3), out=zeros(6)[::2])),
    "read-only": (("buffer", "read-only"), lambda c: c.all_reduce(read_only())),
    "read-only out": (("out", "read-only"), lambda c: c.all_reduce(zeros(4), out=read_only())),
    "dtype of out": (
        ("out", "float64", "float32"),
        lambda c: c.all_reduce(zeros(4), out=zeros(4, "float64")),
    ),
    "size of out": (("out", "3", "4"), lambda c: c.all_reduce(zeros(4), out=zeros(3))),
    "overlap": (("out", "buffer", "overlap"), overlapping),
    "unknown op": (("op", "product", "mean"), lambda c: c.all_reduce(zeros(4), "product")),
    "mean of integers": (
        ("op", "mean", "int32"),
        lambda c: c.all_reduce(zeros(4, "int32"), "mean"),
    ),
    "root too high": (("root", "9"), lambda c: c.broadcast(zeros(4), 9)),
    "root negative": (("root", "-1"), lambda c: c.broadcast(zeros(4), -1)),
    "root no integer": (("root",), lambda c: c.broadcast(zeros(4), 1.5)),
    "gather into too little": (("out",), lambda c: c.all_gather(zeros(4), zeros(3))),
    "gather own count": (
        ("buffer", "4", "3"),
        lambda c: c.all_gather(zeros(4), zeros(3 * c.size), [3] * c.size),
    ),
    "gather counts too long": (
        ("counts",),
        lambda c: c.all_gather(zeros(4), zeros(4 * c.size), [4] * c.size + [0]),
    ),
    "gather counts negative": (
        ("counts", "-4"),
        lambda c: c.all_gather(zeros(4), zeros(0), [-4] * c.size),
    ),
    "gather counts too much": (
        ("counts",),
        lambda c: c.all_gather(zeros(4), zeros(4), [4] * c.size + [4]),
    ),
    "scatter counts": (
        ("buffer",),
        lambda c: c.reduce_scatter(zeros(5), zeros(2), [2] * c.size),
    ),
    "scatter out": (
        ("out",),
        lambda c: c.reduce_scatter(zeros(2 * c.size), zeros(3), [2] * c.size),
    ),
    "scatter op": (
        ("op", "mean", "int8"),
        lambda c: c.reduce_scatter(zeros(c.size, "int8"), zeros(1, "int8"), op="mean"),
    ),
    "send counts": (
        ("buffer",),
        lambda c: c.all_to_all(zeros(5), zeros(c.size), [2] * c.size, [1] * c.size),
    ),
    "receive counts": (
        ("out",),
        lambda c: c.all_to_all(zeros(c.size), zeros(5), [1] * c.size, [2] * c.size),
    ),
    "send to oneself": (("dst",), lambda c: c.send(zeros(1), c.rank)),
    "send to nobody": (("dst", "7"), lambda c: c.send(zeros(1), 7)),
    "receive from oneself": (("src",), lambda c: c.recv(zeros(1), c.rank)),
    "receive from nobody": (("src", "-2"), lambda c: c.recv(zeros(1), -2)),
    "timeout of nothing": (("timeout", "0"), lambda c: c.barrier(timeout=0)),
    "timeout negative": (("timeout", "-1"), lambda c: c.all_reduce(zeros(1), timeout=-1)),
    "timeout without end": (("timeout", "inf"), lambda c: c.barrier(timeout=float("inf"))),
    "timeout set to nothing": (("timeout", "0"), lambda c: setattr(c, "timeout", 0)),
    "timeout no number": (("timeout", "'5'"), lambda c: c.all_reduce(zeros(1), timeout="5")),
    "timeout set to no number": (("timeout", "'5'"), lambda c: setattr(c, "timeout", "5")),
    "tag no integer": (("tag", "1.5"), lambda c: c.send(zeros(1), (c.rank + 1) % c.size, 1.5)),
    "tag too high": (("tag",), lambda c: c.recv(zeros(1), (c.rank + 1) % c.size, 1 << 31)),
    "op no text": (("op", "3"), lambda c: c.all_reduce(zeros(1), 3)),
    "dst no integer": (("dst", "'1'"), lambda c: c.send(zeros(1), "1")),
    "counts no integers": (
        ("counts", "1.0"),
        lambda c: c.all_gather(zeros(1), zeros(c.size), [1.0] * c.size),
    ),
    "color negative": (("color", "-1"), lambda c: c.split(-1)),
    "color too high": (("color",), lambda c: c.split(1 << 31)),
    "key too low": (("key",), lambda c: c.split(0, -(1 << 31) - 1)),
    "color no integer": (("color",), lambda c: c.split("red")),
    "key no integer": (("key",), lambda c: c.split(0, "first")),
}


MISALIGNED: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "array": (("buffer", "aligned"), lambda c: c.all_reduce(misaligned())),
    "out": (("out", "aligned"), lambda c: c.all_reduce(zeros(4), out=misaligned())),
    "tensor": (("buffer", "aligned"), lambda c: c.all_reduce(tensor_of(misaligned()))),
}


def raise_and_go_on(comm: Any, call: Callable[[Any], Any]) -> tuple[bool, str]:
    error = caught(lambda: call(comm))
    buffer = np.ones(3)
    comm.all_reduce(buffer)
    assert buffer.tolist() == [comm.size] * 3
    return isinstance(error, TypeError | ValueError), f"{type(error).__name__}: {error}"


def check_refused(
    pool: RankPool, size: int, words: tuple[str, ...], call: Callable[[Any], Any]
) -> None:
    for right_type, text in pool.run(raise_and_go_on, call, size=size):
        assert right_type, text
        assert all(word in text for word in words), text


class ArgumentsContract:
    """At every number of ranks."""

    @pytest.mark.parametrize("case", CASES)
    def test_wrong_argument(self, pool: RankPool, size: int, case: str) -> None:
        check_refused(pool, size, *CASES[case])


class AlignmentContract:
    """At every number of ranks; not for copies of buffers on a device, which are aligned."""

    @pytest.mark.parametrize("case", MISALIGNED)
    def test_misaligned(self, pool: RankPool, size: int, case: str) -> None:
        check_refused(pool, size, *MISALIGNED[case])
