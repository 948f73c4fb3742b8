"""What MPI does without blocking: single requests, and sums whose pieces travel at once."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tagi_ddp.communicators.buffers import cut, equal_counts
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.host import messages
from tagi_ddp.communicators.host.mpi_library import MPI
from tagi_ddp.communicators.host.reduce import combine

_SPIN = 0.005  # seconds of polling before the pauses begin
_POLLS = 4  # between two looks at the clock: MPI gets on by a little in each
_PAUSES = (0.0001, 0.001)  # seconds between two polls: at first, and when they take long
# Bytes that MPI sends over TCP without asking the receiver, whose leave would come behind what it
# sends itself; and how many such pieces each rank is sent at a time.
_PIECE, _FLYING = 60_000, 64
_EXCHANGED = 4  # and how many of them two hosts exchange at a time, in all lanes

_PART = 1 << 20  # bytes of a message in which leave costs less than pieces would

_TYPES = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}

_pending: set[Operation] = set()  # MPI may write to their buffers, even when nothing waits


class Operation(ABC):
    """What MPI does without blocking; it only advances while it is polled."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        _pending.add(self)

    @abstractmethod
    def poll(self) -> bool:
        """Advance; tell whether it is done."""

    def ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        with np.errstate(all="ignore"):  # infinities and NaN are the caller's business
            while not any(self.poll() for _ in range(_POLLS)):
                now = time.monotonic()
                if now > end:
                    return False
                age = now - self._begun
                if age < _SPIN:
                    os.sched_yield()
                else:
                    time.sleep(min(max(age / 100, _PAUSES[0]), _PAUSES[1]))
        _pending.discard(self)
        return True


class Request(Operation):
    """Requests of MPI that are under way at once."""

    def __init__(self, *requests: MPI.Request) -> None:
        super().__init__()
        self._requests = list(requests)

    def poll(self) -> bool:
        return MPI.Request.Testall(self._requests)


class SmallSum(Operation):
    """An all_reduce of few bytes, by few messages, which have the number ``tag``."""

    def __init__(self, mpi: MPI.Intracomm, array: np.ndarray, op: ReduceOp, tag: int) -> None:
        super().__init__()
        self._awaited = messages.all_reduce(_Messages(mpi, tag), array, op)
        self._next = next(self._awaited, None)

    def poll(self) -> bool:
        while self._next is not None:
            if not self._next.Test():
                return False
            self._next = next(self._awaited, None)
        return True


class _Messages:
    """MPI's messages under one ``tag``."""

    def __init__(self, mpi: MPI.Intracomm, tag: int) -> None:
        self.rank, self.size = mpi.rank, mpi.size
        self._mpi, self._tag = mpi, tag

    def connect(self, dst: int, src: int) -> Iterator[MPI.Request]:
        return iter(())  # MPI does when ranks first send

    def send(self, array: np.ndarray, dst: int) -> MPI.Request:
        return self._mpi.Isend([array, mpi_type(array)], dst, self._tag)

    def recv(self, array: np.ndarray, src: int) -> MPI.Request:
        return self._mpi.Irecv([array, mpi_type(array)], src, self._tag)


class Sum(Operation):
    """An all_reduce: each rank reduces a slice, in the order of the ranks, for all.

    Slices travel in pieces: this rank reduces some while others are on their way. Messages have the
    number ``tag`` if they are to be reduced, and the next one if they have been. Open MPI's own sum
    that does not block uses one direction of the network at a time where few ranks take part.
    """

    def __init__(self, mpi: MPI.Intracomm, array: np.ndarray, op: ReduceOp, tag: int) -> None:
        super().__init__()
        self._mpi, self._op, self._tag, self._type = mpi, op, tag, mpi_type(array)
        ends = np.cumsum(equal_counts(array.size, mpi.size))
        slices = [_pieces(part) for part in np.split(array, ends[:-1])]
        self._own = slices[mpi.rank]
        self._peers = [_Peer(i, slices[i]) for i in range(mpi.size) if i != mpi.rank]
        self._peers.sort(key=lambda peer: (peer.rank - mpi.rank) % mpi.size)  # each another first
        # By piece, what is to be reduced: a row for each rank.
        self._rows = [np.empty((mpi.size, piece.size), array.dtype) for piece in self._own]
        for peer in self._peers:
            peer.comes = [self._receive(rows[peer.rank], peer, tag) for rows in self._rows]
            self._exchange(peer)
        self._reduced = 0  # pieces
        self._told: list[MPI.Request] = []  # sent when they were

    def poll(self) -> bool:
        for peer in self._peers:
            self._exchange(peer)
        while self._reduced < len(self._own) and all(
            peer.comes[self._reduced].Test() for peer in self._peers
        ):
            piece, rows = self._own[self._reduced], self._rows[self._reduced]
            rows[self._mpi.rank] = piece
            combine(self._op).reduce(rows, axis=0, out=piece)
            self._told += [self._send(piece, peer, self._tag + 1) for peer in self._peers]
            self._reduced += 1
        return (
            self._reduced == len(self._own)
            and all(len(peer.results) == len(peer.pieces) for peer in self._peers)
            and all(peer.results[-1].Test() for peer in self._peers if peer.results)
            and MPI.Request.Testall([r for peer in self._peers for r in peer.results] + self._told)
        )

    def _exchange(self, peer: _Peer) -> None:
        """Send what the peer is to reduce; then its result may come in the same place."""
        sent, results = peer.sent, peer.results
        while len(results) < len(sent) and sent[len(results)].Test():
            results.append(self._receive(peer.pieces[len(results)], peer, self._tag + 1))
        while len(sent) < min(len(peer.pieces), len(results) + _FLYING):
            sent.append(self._send(peer.pieces[len(sent)], peer, self._tag))

    def _send(self, piece: np.ndarray, peer: _Peer, tag: int) -> MPI.Request:
        return self._mpi.Isend([piece, self._type], peer.rank, tag)

    def _receive(self, piece: np.ndarray, peer: _Peer, tag: int) -> MPI.Request:
        return self._mpi.Irecv([piece, self._type], peer.rank, tag)


class Exchange(Operation):
    """An all_reduce of two ranks, each of which reduces all: in one step, and as few bytes.

    Large parts travel all at once, pieces a few at a time, fewer where a host has more ``lanes``: a
    network may lose what these send at once. Messages have the number ``tag``.
    """

    def __init__(
        self, mpi: MPI.Intracomm, array: np.ndarray, op: ReduceOp, tag: int, lanes: int
    ) -> None:
        super().__init__()
        self._mpi, self._op, self._tag, self._type = mpi, op, tag, mpi_type(array)
        large = array.nbytes // _PART
        self._own = cut(array, equal_counts(array.size, large)) if large else _pieces(array)
        self._rows = [np.empty(part.size, part.dtype) for part in self._own]
        self._sent: list[MPI.Request] = []
        self._came: list[MPI.Request] = []
        self._reduced = 0  # parts
        for _ in range(large or min(max(1, _EXCHANGED // lanes), len(self._own))):
            self._begin()

    def _begin(self) -> None:
        i, other = len(self._sent), 1 - self._mpi.rank
        # First what asks for leave, as it would come behind what the other one gets leave for.
        self._sent.append(self._mpi.Isend([self._own[i], self._type], other, self._tag))
        self._came.append(self._mpi.Irecv([self._rows[i], self._type], other, self._tag))

    def poll(self) -> bool:
        for i in range(self._reduced, len(self._own)):
            if not (self._came[i].Test() and self._sent[i].Test()):
                return False
            if len(self._sent) < len(self._own):
                self._begin()
            own, row = self._own[i], self._rows[i]
            rows = (own, row) if self._mpi.rank == 0 else (row, own)
            combine(self._op)(*rows, out=own)
            self._reduced += 1
        return True


@dataclass
class _Peer:
    """Another rank in a sum, and the pieces that it reduces."""

    rank: int
    pieces: list[np.ndarray]
    comes: list[MPI.Request] = field(default_factory=list)  # what this rank reduces
    sent: list[MPI.Request] = field(default_factory=list)
    results: list[MPI.Request] = field(default_factory=list)


def mpi_type(array: np.ndarray) -> MPI.Datatype:
    """Return MPI's type of as many bytes as an element has."""
    return _TYPES[array.itemsize]


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    step = _PIECE // array.itemsize
    return [array[begin : begin + step] for begin in range(0, array.size, step)]
