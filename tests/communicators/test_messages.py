"""Collectives made of messages, over messages that are read as late as they may be."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.host import messages

Wait = Callable[[], None]
SIZES = st.integers(1, 9)
COUNTS = st.integers(0, 70)  # of int32 and float64, of which 16 bytes of a rank are few
DTYPES = st.sampled_from([np.int32, np.float64])
LIMIT = 20.0


class Post:
    """What ranks have sent each other, and the ranks that are not there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.mail: defaultdict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        self.taken: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.gone: set[int] = set()

    def until(self, ready: Callable[[], bool], others: set[int]) -> None:
        """Wait; callers hold ``changed``."""
        assert self.changed.wait_for(lambda: ready() or bool(others & self.gone), LIMIT)
        if not ready():
            raise RuntimeError("a rank is gone")


class Peers:
    """The messages of one rank; a sender's memory is read when the receiver waits."""

    def __init__(self, post: Post, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.bytes = self.messages = 0
        self._post = post
        self._begun: defaultdict[int, int] = defaultdict(int)

    def connect(self, dst: int, src: int) -> Iterator[Wait]:
        return iter(())

    def send(self, array: np.ndarray, dst: int) -> Wait:
        assert dst != self.rank
        self.bytes += array.nbytes
        self.messages += 1
        post, way = self._post, (self.rank, dst)
        with post.changed:
            post.mail[way].append(array)
            number = len(post.mail[way])
            post.changed.notify_all()

        def wait() -> None:
            with post.changed:
                post.until(lambda: post.taken[way] >= number, {dst})

        return wait

    def recv(self, array: np.ndarray, src: int) -> Wait:
        post, way, number = self._post, (src, self.rank), self._begun[src]
        self._begun[src] += 1

        def wait() -> None:
            with post.changed:
                post.until(lambda: len(post.mail[way]) > number, {src})
                assert post.taken[way] == number, "out of order"
                array[...] = post.mail[way][number]
                post.taken[way] += 1
                post.changed.notify_all()

        return wait


def run(
    size: int, operation: Callable[[Peers], Iterator[Wait]], missing: int | None = None
) -> list[Peers]:
    """Run ``operation`` on all ranks, but one that is ``missing``."""
    post = Post()
    ranks = [Peers(post, rank, size) for rank in range(size)]
    errors: list[BaseException] = []

    def serve(peers: Peers) -> None:
        try:
            for wait in operation(peers):
                wait()
        except BaseException as error:
            errors.append(error)
            leave(peers.rank)

    def leave(rank: int) -> None:
        with post.changed:
            post.gone.add(rank)
            post.changed.notify_all()

    threads = [
        threading.Thread(target=serve, args=(p,), daemon=True) for p in ranks if p.rank != missing
    ]
    with mock.patch.object(messages, "SMALL", 16):
        if missing is not None:
            leave(missing)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    if missing is None and errors:
        raise errors[0]
    assert all(isinstance(error, RuntimeError) for error in errors)
    return ranks


def inputs(size: int, count: int, dtype: Any, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(-999, 999, count).astype(dtype) / dtype(8) for _ in range(size)]


@given(SIZES, COUNTS, DTYPES, st.sampled_from(["sum", "mean", "min", "max"]), st.integers(0, 99))
def test_all_reduce(size: int, count: int, dtype: Any, op: ReduceOp, seed: int) -> None:
    arrays = [each.astype(dtype) for each in inputs(size, count, dtype, seed)]
    reduce = {"min": np.min, "max": np.max}.get(op, np.sum)
    expected = reduce(np.stack(arrays), axis=0).astype(dtype)  # exact, in any order
    ranks = run(size, lambda peers: messages.all_reduce(peers, arrays[peers.rank], op))
    for array in arrays:
        assert np.array_equal(array, expected)
    if count * expected.itemsize > 16 * size:
        most = 2 * (count - count // size) * expected.itemsize
        assert all(peers.bytes <= most for peers in ranks), "more than a rank must send"


@given(SIZES.filter(lambda size: size > 1), COUNTS, st.data())
def test_nothing_is_reduced_before_all_have_come(
    size: int, count: int, data: st.DataObject
) -> None:
    arrays = inputs(size, count, np.float64, 0)
    kept = [array.copy() for array in arrays]
    missing = data.draw(st.integers(0, size - 1))
    run(size, lambda peers: messages.all_reduce(peers, arrays[peers.rank], "sum"), missing)
    assert all(np.array_equal(array, old) for array, old in zip(arrays, kept, strict=True))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), DTYPES)
def test_all_gather(counts: list[int], dtype: Any) -> None:
    own = [np.full(count, 1 + rank, dtype) for rank, count in enumerate(counts)]
    outs = [np.zeros(sum(counts), dtype) for _ in counts]
    run(
        len(counts),
        lambda peers: messages.all_gather(peers, own[peers.rank], outs[peers.rank], counts),
    )
    for out in outs:
        assert np.array_equal(out, np.concatenate(own))


@given(SIZES, st.data())
def test_all_to_all(size: int, data: st.DataObject) -> None:
    table = np.array(data.draw(st.lists(st.integers(0, 9), min_size=size**2, max_size=size**2)))
    table = table.reshape(size, size)  # from a rank to another
    parts = [[np.full(table[a, b], 10 * a + b) for b in range(size)] for a in range(size)]
    outs = [np.zeros(table[:, rank].sum(), parts[0][0].dtype) for rank in range(size)]

    def exchange(peers: Peers) -> Iterator[Wait]:
        array, rank = np.concatenate(parts[peers.rank]), peers.rank
        return messages.all_to_all(peers, array, outs[rank], [*table[rank]], [*table[:, rank]])

    run(size, exchange)
    for rank, out in enumerate(outs):
        assert np.array_equal(out, np.concatenate([parts[a][rank] for a in range(size)]))


@given(SIZES, COUNTS, st.data())
def test_broadcast(size: int, count: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    arrays = inputs(size, count, np.float64, 0)
    expected = arrays[root].copy()
    run(size, lambda peers: messages.broadcast(peers, arrays[peers.rank], root))
    assert all(np.array_equal(array, expected) for array in arrays)


@pytest.mark.parametrize(("size", "few"), [(2, 1), (4, 2), (7, 6), (8, 3), (12, 4), (64, 6)])
def test_a_small_sum_takes_few_messages(size: int, few: int) -> None:
    ranks = run(size, lambda peers: messages.all_reduce(peers, np.ones(2), "sum"))
    assert [peers.messages for peers in ranks] == [few] * size
