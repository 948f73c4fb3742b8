"""Collectives made of messages between two ranks, for an engine that moves no more than those.

What is small takes few messages: each of 12 ranks deals with one other, then with one of the next
pair, then with two of the other fours. What is large travels in a ring, in which every link carries
the same, and no more than it must (Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH, 2005, who call these recursive doubling and ring).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np

from tagi_ddp.communicators.buffers import cut, equal_counts
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.host.reduce import combine

SMALL = 1 << 13
"""Bytes that take no longer than the messages about them."""

_ROWS = 4  # of what comes to be added, which a rank awaits at once: none waits for its leave

T = TypeVar("T")  # a message that has begun
T_co = TypeVar("T_co", covariant=True)


class Messages(Protocol[T_co]):
    """The messages of rank ``rank`` of ``size`` in one operation, in their order for each peer.

    An operation yields each message that has to be complete before it goes on, one after the other
    and each once.
    """

    rank: int
    size: int

    def connect(self, dst: int, src: int) -> Iterator[T_co]:
        """Prepare to send to one rank and to receive from one, which prepare for it now."""
        ...

    def send(self, array: np.ndarray, dst: int) -> T_co:
        """Begin to send a flat array, which is not written to before that is complete."""
        ...

    def recv(self, array: np.ndarray, src: int) -> T_co:
        """Begin to receive in a flat array."""
        ...


def connect(peers: Messages[T]) -> Iterator[T]:
    """Connect the ranks that deal with each other in sums."""
    if peers.size > 1:
        yield from peers.connect((peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size)
    nothing = np.empty(0)
    for group in _groups(peers):
        yield from _exchange(peers, group, [nothing] * len(group), [nothing] * len(group))


def all_reduce(peers: Messages[T], array: np.ndarray, op: ReduceOp) -> Iterator[T]:
    """Reduce the arrays of all in place, to the same bits; a mean is left a sum.

    Nothing is written to before all ranks have come.
    """
    if is_large(peers.size, array):
        parts = cut(array, equal_counts(array.size, peers.size))
        yield from _reduce_around(peers, parts, op)
        yield from _gather_around(peers, parts, (peers.rank + 1) % peers.size)
        return
    total = array
    for group in _groups(peers):
        rows = np.empty((len(group), array.size), array.dtype)
        mine = rows[group.index(peers.rank)]
        mine[...] = total
        yield from _exchange(peers, group, [mine] * len(group), list(rows))
        with np.errstate(all="ignore"):  # infinities and NaN are the caller's business
            total = combine(op).reduce(rows, axis=0)
    array[...] = total


def all_gather(
    peers: Messages[T], array: np.ndarray, out: np.ndarray, counts: list[int]
) -> Iterator[T]:
    """Concatenate the arrays of all, of so many elements, in ``out``."""
    parts = cut(out, counts)
    parts[peers.rank][...] = array
    if is_large(peers.size, out):
        yield from _gather_around(peers, parts, peers.rank)
        return
    ends = list(accumulate(counts, initial=0))
    stride = 1  # ranks whose parts this one has
    for group in _groups(peers):
        firsts = [rank - rank % stride for rank in group]
        blocks = [out[ends[first] : ends[first + stride]] for first in firsts]
        mine = blocks[group.index(peers.rank)]
        yield from _exchange(peers, group, [mine] * len(group), blocks)
        stride *= len(group)


def all_to_all(
    peers: Messages[T], array: np.ndarray, out: np.ndarray, sent: list[int], received: list[int]
) -> Iterator[T]:
    """Send so many elements to each rank, and receive so many from each, in rank order."""
    goes, comes = cut(array, sent), cut(out, received)
    comes[peers.rank][...] = goes[peers.rank]
    yield from _exchange(peers, list(range(peers.size)), goes, comes)


def broadcast(peers: Messages[T], array: np.ndarray, root: int) -> Iterator[T]:
    """Copy the array of ``root`` to all."""
    rank, size = peers.rank, peers.size
    place = (rank - root) % size
    sent = []
    have = 1  # which twice as many do after each round
    while have < size:
        if place < have and place + have < size:
            sent.append(peers.send(array, (rank + have) % size))
        elif have <= place < 2 * have:
            yield peers.recv(array, (rank - have) % size)
        have *= 2
    yield from sent


def is_large(size: int, array: np.ndarray) -> bool:
    """Return whether an array of so many ranks travels in a ring."""
    return size > 1 and array.nbytes > SMALL * size


def factors(size: int) -> list[int]:
    """Return the prime factors of a number of ranks, from the least on."""
    found: list[int] = []
    while size > 1:
        found.append(next(f for f in range(2, size + 1) if size % f == 0))
        size //= found[-1]
    return found


def _groups(peers: Messages[T]) -> Iterator[list[int]]:
    """Return this rank's groups: first of neighbours, then of the first groups, and so on."""
    stride = 1
    for factor in factors(peers.size):
        first = peers.rank - peers.rank // stride % factor * stride
        yield [first + i * stride for i in range(factor)]
        stride *= factor


def _exchange(
    peers: Messages[T], group: list[int], goes: list[np.ndarray], comes: list[np.ndarray]
) -> Iterator[T]:
    """Send to each other of a group what goes to it, and receive what comes from it."""
    place, size = group.index(peers.rank), len(group)
    sent: list[T] = []
    received: deque[T] = deque()
    for step in range(1, size):
        to, since = (place + step) % size, (place - step) % size
        yield from peers.connect(group[to], group[since])
        # First, as word of it would come behind what this rank sends.
        received.append(peers.recv(comes[since], group[since]))
        sent.append(peers.send(goes[to], group[to]))
        if comes[since].nbytes > SMALL:  # what several send at once, a network may lose
            yield received.popleft()
    yield from received
    yield from sent


def _reduce_around(peers: Messages[T], parts: list[np.ndarray], op: ReduceOp) -> Iterator[T]:
    """Reduce the part behind this rank's own in place: a sum goes around the ring for each."""
    rank, steps = peers.rank, peers.size - 1
    before, after = (rank - 1) % peers.size, (rank + 1) % peers.size
    yield from peers.connect(after, before)
    rows = np.empty((min(_ROWS, steps), parts[0].size), parts[0].dtype)

    def row(step: int) -> np.ndarray:
        return rows[step % len(rows), : parts[rank - 1 - step].size]

    came = deque(peers.recv(row(step), before) for step in range(len(rows)))
    sent = deque([peers.send(parts[rank], after)])
    for step in range(steps):
        yield came.popleft()
        own, last = parts[rank - 1 - step], step == steps - 1
        with np.errstate(all="ignore"):
            # All have come once a sum has gone around.
            total = combine(op)(row(step), own, out=own if last else row(step))
        if not last:
            sent.append(peers.send(total, after))
        yield sent.popleft()
        if 0 < step <= steps - len(rows):  # there is room where what has been sent was
            came.append(peers.recv(row(step - 1 + len(rows)), before))


def _gather_around(peers: Messages[T], parts: list[np.ndarray], first: int) -> Iterator[T]:
    """Bring all parts to all; each rank has the one with number ``first``, the next the next."""
    rank, size = peers.rank, peers.size
    before, after = (rank - 1) % size, (rank + 1) % size
    yield from peers.connect(after, before)
    sent = []
    received = [peers.recv(parts[first - step], before) for step in range(1, size)]
    for step, each in enumerate(received):
        sent.append(peers.send(parts[first - step], after))
        yield each
    yield from sent
