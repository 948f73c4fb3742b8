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

_SMALL = 1 << 13  # bytes that take no longer than the messages about them

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
        yield from _connect_around(peers)
    nothing = np.empty(0)
    for group in _groups(peers):
        yield from _exchange(peers, group, [nothing] * len(group), [nothing] * len(group))


def all_reduce(peers: Messages[T], array: np.ndarray, op: ReduceOp) -> Iterator[T]:
    """Reduce the arrays of all in place, to the same bits; a mean is left a sum.

    Nothing is written to before all ranks have come.
    """
    if _is_large(peers, array):
        parts = cut(array, equal_counts(array.size, peers.size))
        yield from _sum_around(peers, parts, op)
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
    if _is_large(peers, out):
        yield from _connect_around(peers)
        yield from _hand_on(peers, parts, peers.rank, _receive(peers, parts, peers.rank))
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


def _is_large(peers: Messages[T], array: np.ndarray) -> bool:
    return peers.size > 1 and array.nbytes > _SMALL * peers.size


def _groups(peers: Messages[T]) -> Iterator[list[int]]:
    """Return this rank's groups: first of neighbours, then of the first groups, and so on."""
    stride = 1
    while stride < peers.size:
        rest = peers.size // stride
        factor = next(f for f in range(2, rest + 1) if rest % f == 0)
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
        if comes[since].nbytes > _SMALL:  # what several send at once, a network may lose
            yield received.popleft()
    yield from received
    yield from sent


# The ring. A message is begun to be received before what this rank sends meanwhile: gloo and MPI
# tell the sender that it may send, and that would come behind.


def _connect_around(peers: Messages[T]) -> Iterator[T]:
    yield from peers.connect((peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size)


def _sum_around(peers: Messages[T], parts: list[np.ndarray], op: ReduceOp) -> Iterator[T]:
    """Reduce all parts in place: of each, a sum goes around, then the result."""
    rank, steps = peers.rank, peers.size - 1
    first = (rank + 1) % peers.size  # the part whose result this rank will have
    yield from _connect_around(peers)
    rows = np.empty((min(3, steps), parts[0].size), parts[0].dtype)

    def receive(step: int) -> T:
        row = rows[step % 3, : parts[rank - 1 - step].size]
        return peers.recv(row, (rank - 1) % peers.size)

    total = parts[rank]
    sent: deque[T] = deque()
    coming = [receive(0)]
    for step in range(steps):
        if step > 0:  # the row that comes next
            yield sent.popleft()
        last = step == steps - 1
        ahead = _receive(peers, parts, first) if last else [receive(step + 1)]
        sent.append(peers.send(total, (rank + 1) % peers.size))
        yield from coming
        row, own = rows[step % 3], parts[rank - 1 - step]
        with np.errstate(all="ignore"):
            # All have come once a sum has gone around.
            total = combine(op)(row[: own.size], own, out=own if last else row[: own.size])
        coming = ahead
    yield from _hand_on(peers, parts, first, coming)
    yield from sent


def _receive(peers: Messages[T], parts: list[np.ndarray], first: int) -> list[T]:
    """Begin to receive all parts but the one with number ``first``, which this rank has."""
    return [
        peers.recv(parts[first - step], (peers.rank - 1) % peers.size)
        for step in range(1, peers.size)
    ]


def _hand_on(
    peers: Messages[T], parts: list[np.ndarray], first: int, coming: list[T]
) -> Iterator[T]:
    """Bring all parts to all; each rank has the one with number ``first``, the next the next."""
    sent = []
    for step, each in enumerate(coming):
        sent.append(peers.send(parts[first - step], (peers.rank + 1) % peers.size))
        yield each
    yield from sent
