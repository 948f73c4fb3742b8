"""Communicators over somebody else's engine, made safe by a `Watch` beside it.

An engine may hang, crash or mix up data when ranks do not call the same. So ranks first exchange
notes over the watch, one to each other rank, and the engine starts when all fit. It only ever
copies bytes: reductions are done here, each element on one rank, so that all get the same bits.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tagi_ddp.communicators.base import BaseCommunicator, Call
from tagi_ddp.communicators.buffers import Elements
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.errors import CommunicatorError, Mismatch, Timeout, timeout_text
from tagi_ddp.communicators.meeting import Meeting, Transfer
from tagi_ddp.communicators.reduce import reduce_rows
from tagi_ddp.communicators.watch import Channel, Failure, Watch
from tagi_ddp.communicators.wire import Listener

P = TypeVar("P", bound="PeerCommunicator")

_PART = 1 << 26  # bytes reduced at a time, which limits the temporary memory


class PeerCommunicator(BaseCommunicator):
    """A rank with a watch on all others; a subclass adds the engine."""

    def __init__(self, rank: int, size: int, timeout: float, watch: Watch) -> None:
        """Make rank ``rank`` of ``size``; its engine is yet to be opened."""
        super().__init__(rank, size, timeout)
        self._watch = watch
        self._others = [r for r in range(size) if r != rank]
        self._copied = 0  # the last collective that used the engine
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._process = os.getpid()
        _open.add(self)

    # The engine copies flat arrays of one dtype; its methods are called alike on all ranks.

    @abstractmethod
    def _engine_broadcast(self, array: np.ndarray, root: int, limit: float) -> Transfer: ...

    @abstractmethod
    def _engine_all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Transfer: ...

    @abstractmethod
    def _engine_all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        limit: float,
    ) -> Transfer: ...

    @abstractmethod
    def _engine_send(self, array: np.ndarray, dst: int, limit: float) -> Transfer: ...

    @abstractmethod
    def _engine_recv(self, array: np.ndarray, src: int, limit: float) -> Transfer: ...

    @abstractmethod
    def _engine_split(self: P, call: Call, color: int | None, key: int, part: P | None) -> None:
        """Open the engine of ``part``; on a rank that is in no part it is None."""

    @abstractmethod
    def _engine_close(self, clean: bool) -> None:
        """Free the engine; unless ``clean``, without waiting for what may be stuck in it."""

    # Operations.

    def _all_reduce(self, call: Call, source: Elements, target: Elements, op: ReduceOp) -> None:
        meeting = self._meet(call)
        step = _PART // source.array.itemsize
        for start in range(0, source.count, step):
            part = slice(start, min(start + step, source.count))
            base, more = divmod(part.stop - start, self.size)
            counts = [base + (rank < more) for rank in range(self.size)]
            mine = np.empty(counts[self.rank], source.array.dtype)
            self._scatter(meeting, call, source, source.array[part], mine, counts, op)
            out = target.array[part]
            meeting.carry(self._engine_all_gather(mine, out, counts, call.left()))
        self._done(meeting, call)

    def _reduce_scatter(
        self, call: Call, source: Elements, target: Elements, counts: list[int], op: ReduceOp
    ) -> None:
        meeting = self._meet(call)
        self._scatter(meeting, call, source, source.array, target.array, counts, op)
        self._done(meeting, call)

    def _scatter(
        self,
        meeting: Meeting,
        call: Call,
        source: Elements,
        array: np.ndarray,
        out: np.ndarray,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        """Reduce this rank's slice of ``array``, a part of ``source``, into ``out``."""
        rows = np.empty((self.size, out.size), array.dtype)
        shares = [out.size] * self.size
        flat = rows.reshape(-1)
        meeting.carry(self._engine_all_to_all(array, flat, counts, shares, call.left()))
        reduce_rows(rows, source.dtype, op, out)

    def _broadcast(self, call: Call, data: Elements, root: int) -> None:
        meeting = self._meet(call)
        meeting.carry(self._engine_broadcast(data.array, root, call.left()))
        self._done(meeting, call)

    def _all_gather(
        self, call: Call, source: Elements, target: Elements, counts: list[int]
    ) -> None:
        meeting = self._meet(call)
        meeting.carry(self._engine_all_gather(source.array, target.array, counts, call.left()))
        self._done(meeting, call)

    def _all_to_all(
        self, call: Call, source: Elements, target: Elements, sent: list[int], received: list[int]
    ) -> None:
        meeting = self._meeting(call)
        tables = {**meeting.gather([sent, received]), self.rank: [sent, received]}
        for a in range(self.size):
            for b in range(self.size):
                sends, expects = tables[a][0][b], tables[b][1][a]
                if sends != expects:
                    raise Mismatch(
                        f"{self._where(call.title)}: rank {a} sends {sends} elements to rank {b}, "
                        f"which expects {expects}. Make what a rank sends what the other expects.",
                        [rank for rank in (a, b) if rank != self.rank],
                    )
        meeting.carry(
            self._engine_all_to_all(source.array, target.array, sent, received, call.left())
        )
        self._done(meeting, call)

    def _send(self, call: Call, data: Elements, dst: int) -> None:
        meeting = self._meeting(call, [dst], (Channel.SEND, Channel.RECV))
        meeting.gather(None)
        meeting.carry(self._engine_send(data.array, dst, call.left()))
        self._sent[dst] = call.number

    def _recv(self, call: Call, data: Elements, src: int) -> None:
        meeting = self._meeting(call, [src], (Channel.RECV, Channel.SEND))
        meeting.gather(None)
        meeting.carry(self._engine_recv(data.array, src, call.left()))
        meeting.leave()

    def _barrier(self, call: Call) -> None:
        self._meet(call).leave()

    def _split(self: P, call: Call, color: int | None, key: int) -> P | None:
        with Listener() as listener:
            own = [color, key, listener.record.decode()]
            meeting = self._meeting(call)
            notes = {**meeting.gather(own), self.rank: own}
            part: P | None = None
            if color is not None:
                members = sorted((notes[r][1], r) for r in notes if notes[r][0] == color)
                ranks = [rank for _, rank in members]
                records = [notes[rank][2].encode() for rank in ranks]
                rank = ranks.index(self.rank)
                sockets, missing = listener.connect(rank, records, call.deadline)
                if missing:
                    absent = [ranks[r] for r in missing]
                    what = timeout_text(absent, call.limit)
                    raise Timeout(f"{self._where(call.title)}: {what}", absent)
                part = type(self)(rank, len(ranks), self.timeout, Watch(sockets))
        try:
            self._engine_split(call, color, key, part)
        except BaseException as error:
            if part is not None:
                part.abort(f"{call.title} ended in {error!r}")
                part.close()
            raise
        meeting.leave()
        return part

    # Meetings, and the end.

    def _meet(self, call: Call) -> Meeting:
        """Return the meeting of all ranks for ``call`` once they have come."""
        meeting = self._meeting(call)
        meeting.gather(None)
        return meeting

    def _meeting(
        self,
        call: Call,
        peers: list[int] | None = None,
        channels: tuple[Channel, Channel] = (Channel.COLLECTIVE, Channel.COLLECTIVE),
    ) -> Meeting:
        return Meeting(
            self._watch,
            self._where(call.title),
            self.rank,
            call,
            self._others if peers is None else peers,
            channels,
            lambda: self._failure,
        )

    def _done(self, meeting: Meeting, call: Call) -> None:
        self._copied = call.number
        meeting.leave()

    def _announce(self, error: CommunicatorError, reason: str) -> None:
        self._watch.tell_failure(Failure(type(error).__name__, error.ranks, reason))

    def _leave(self) -> None:
        # The others may still be reading what this rank's engine sent.
        self._watch.until(self._all_through, time.monotonic() + self.timeout)
        clean = self._failure is None and not self._watch.failures
        self._engine_close(clean)
        self._watch.close()
        _open.discard(self)

    def _all_through(self) -> bool:
        watch = self._watch
        if self._failure is not None or watch.failures:
            return True
        return all(
            watch.left.get((rank, Channel.COLLECTIVE), 0) >= self._copied
            and watch.left.get((rank, Channel.RECV), 0) >= self._sent[rank]
            for rank in self._others
            if rank not in watch.died | watch.closed
        )

    def end_with_process(self) -> None:
        """Close; abort first, so that the others learn the reason, if an error ends the process."""
        if self._process != os.getpid():
            return  # a fork: the connections are its parent's
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


_open: weakref.WeakSet[PeerCommunicator] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Close every open communicator of this process, which ends."""
    for communicator in list(_open):
        communicator.end_with_process()


def connect(
    kind: type[P],
    rank: int,
    size: int,
    timeout: float,
    deadline: float,
    exchange: Callable[[bytes], Sequence[bytes]],
) -> P:
    """Return a communicator of ``kind`` with its watch connected and its engine yet to open.

    ``exchange(record)`` returns every rank's record; it raises what keeps it from that.
    """
    with Listener() as listener:
        records = exchange(listener.record)
        sockets, missing = listener.connect(rank, records, deadline)
    if missing:
        for connection in sockets.values():
            connection.close()
        where = f"init on rank {rank} of {size} ({kind.backend})"
        raise Timeout(f"{where}: {timeout_text(missing, timeout)}", missing)
    return kind(rank, size, timeout, Watch(sockets))
