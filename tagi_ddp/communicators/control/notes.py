"""The state that one rank keeps of its group, and the messages that follow from it; no I/O.

Messages travel between neighbours (`overlay`). One for a single rank is forwarded if the two are
no neighbours. Failures and ends are flooded: every rank forwards them to all its neighbours, so
they arrive even if ranks in between are stuck.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from tagi_ddp.communicators.control import overlay

# kind, series, backwards, origin, target, number; the content follows
_HEADER = struct.Struct("!BBBIIQ")
_ALL = 2**32 - 1  # as a target


class Kind(IntEnum):
    """The kinds of message, each with what its sender states."""

    ENTER = 1  # I call this operation with these arguments, and so do the ranks I know of.
    COMPLETED = 2  # I have completed this operation and all before it.
    WAITING = 3  # I am still in this operation, though it takes long.
    FAIL = 4  # I failed, or gave up.
    KEEP = 5  # Keep this value under this key.
    CLOSE = 6  # I close my communicator.
    DIED = 7  # The connection to this rank has ended.
    ACKNOWLEDGED = 8  # I have completed this operation, and so have the ranks I know of.


class Series(IntEnum):
    """The kinds of operation; each is numbered on its own."""

    SETUP = 0
    COLLECTIVE = 1
    SEND = 2  # of data that the sender of the message sends
    RECV = 3  # of data that it receives


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: the type of its error, the ranks at fault, and the reason."""

    error: str
    ranks: tuple[int, ...]
    reason: str


class Notes:
    """The state that ``rank`` of ``size`` keeps. Its messages are queued in ``outbox``."""

    def __init__(self, rank: int, size: int) -> None:
        """Begin before the first operation."""
        self.rank = rank
        self.size = size
        self.rounds = overlay.rounds(rank, size)
        others = tuple(r for r in range(size) if r != rank)
        self.all_others = overlay.Round(1, others, others)
        self.outbox: deque[tuple[int, bytes]] = deque()
        """Messages to send, each with the neighbour that receives it."""
        self.entered: dict[tuple[int, Series, int], bytes] = {}
        """The messages of operations that this rank has not begun, by rank, series and number."""
        self.completed: dict[tuple[int, Series], int] = {}
        """The number of the last operation that a rank is known to have completed."""
        self.waiting: dict[tuple[int, Series], int] = {}
        """The number of the last operation in which a rank reported that it waits."""
        self.failures: dict[int, Failure] = {}
        self.values: dict[str, bytes] = {}
        """The values that ranks have asked all others to keep."""
        self.closed: set[int] = set()
        self.died: set[int] = set()
        self.acknowledged = -1
        """The number of the last collective known to be complete on all ranks, once one asks."""
        self._neighbours = set(overlay.neighbours(rank, size))
        self._lost: set[int] = set()  # neighbours without a connection
        self._reported = -1  # the last collective that this rank has reported as complete
        self._asked = -1  # the collective of which a rank asks whether all have completed it
        self._acknowledged_by: dict[int, int] = {}  # by each neighbour, for the ranks it knows of
        self._acknowledgements = [-1] * len(self.rounds)  # sent in each round

    # Messages of this rank.

    def enter(self, ranks: Iterable[int], series: Series, number: int, content: bytes) -> None:
        """Send ``ranks`` the call of this one."""
        for rank in ranks:
            self._send(Kind.ENTER, series, number, content, rank)

    def resend(self, rank: int, series: Series, number: int, content: bytes) -> None:
        """Resend by the opposite route, in case a rank on the first route is stuck."""
        if rank not in self._neighbours:
            self._send(Kind.ENTER, series, number, content, rank, backwards=True)

    def wait(self, series: Series, number: int, rank: int | None = None) -> None:
        """Report to ``rank``, or to all, that this rank waits and is not at fault."""
        self.waiting[self.rank, series] = number
        self._send(Kind.WAITING, series, number, b"", rank)

    def leave(self, series: Series, number: int, rank: int | None = None) -> None:
        """Complete an operation; report it to ``rank``, or to the ranks that ask."""
        _raise(self.completed, (self.rank, series), number)
        if rank is not None:
            self._send(Kind.COMPLETED, series, number, b"", rank)
        if self.waiting or self._asked >= 0:
            self._answer()

    def forget(self, number: int) -> None:
        """Drop the calls of collectives up to this one, which were compared without them."""
        for key in [k for k in self.entered if k[1] is Series.COLLECTIVE and k[2] <= number]:
            del self.entered[key]

    def acknowledge(self) -> None:
        """Ask all ranks to acknowledge the last collective of this one; see ``acknowledged``."""
        self._asked = max(self._asked, self.own)
        self._answer()

    def fail(self, failure: Failure) -> None:
        """Send all ranks the failure of this one."""
        content = json.dumps([failure.error, failure.ranks, failure.reason]).encode()
        self._send(Kind.FAIL, Series.COLLECTIVE, self.own + 1, content)

    def keep(self, key: str, value: bytes) -> None:
        """Ask all ranks to keep ``value``."""
        self.values[key] = value
        content = json.dumps([key, value.hex()]).encode()
        message = self._pack(Kind.KEEP, Series.SETUP, 0, content)
        self._send_to_children(message, self.rank)

    def close(self) -> None:
        """Send all ranks that this one closes."""
        self._send(Kind.CLOSE, Series.COLLECTIVE, self.own + 1)

    # Messages of other ranks.

    def lose(self, neighbour: int) -> None:
        """Note that the connection to a neighbour has ended."""
        self._lost.add(neighbour)
        if neighbour not in self.closed | self.died:
            self.died.add(neighbour)
            self._spread(self._pack(Kind.DIED, Series.SETUP, 0, origin=neighbour), neighbour)

    def receive(self, neighbour: int, message: bytes) -> None:
        """Read a message that a neighbour has sent or forwarded.

        Raises ValueError or struct.error if it is none.
        """
        code, count, backwards, origin, target, number = _HEADER.unpack_from(message)
        kind, series, content = Kind(code), Series(count), message[_HEADER.size :]
        if target not in (self.rank, _ALL):
            self._forward(message, target, bool(backwards))
            return
        news = self._note(kind, series, origin, number, content)
        if news and target == _ALL:
            if kind is Kind.KEEP:
                self._send_to_children(message, origin)
            else:
                self._spread(message, neighbour)
        self._answer()

    def _note(self, kind: Kind, series: Series, origin: int, number: int, content: bytes) -> bool:
        """Note a message; return whether it is new to this rank."""
        key = origin, series
        if kind is Kind.ENTER:
            self.entered[origin, series, number] = content
        elif kind is Kind.ACKNOWLEDGED:
            self._acknowledged_by[origin] = number
            self._asked = max(self._asked, number)
        elif kind is Kind.WAITING:
            return _raise(self.waiting, key, number)
        elif kind is Kind.COMPLETED:
            return _raise(self.completed, key, number)
        elif kind is Kind.FAIL:
            _raise(self.completed, key, number - 1)
            if origin in self.failures:
                return False
            error, ranks, reason = json.loads(content)
            self.failures[origin] = Failure(error, tuple(ranks), reason)
        elif kind is Kind.KEEP:
            name, value = json.loads(content)
            self.values[name] = bytes.fromhex(value)
        else:
            if origin in self.closed | self.died:
                return False
            _raise(self.completed, key, number - 1)
            (self.died if kind is Kind.DIED else self.closed).add(origin)
        return True

    def gone(self, series: Series, number: int) -> set[int]:
        """Return the ranks that cannot take part in an operation any more."""
        return self.died | {
            rank
            for rank in self.closed
            if series is not Series.COLLECTIVE or self.completed.get((rank, series), -1) < number
        }

    # Sending.

    @property
    def own(self) -> int:
        """The number of the last collective that this rank has completed."""
        return self.completed.get((self.rank, Series.COLLECTIVE), -1)

    def _answer(self) -> None:
        """Report the last complete collective if a rank waits for it or asks all for it."""
        own = self.own
        for (_, series), number in self.waiting.items():
            if series is Series.COLLECTIVE and self._reported < number <= own:
                self._reported = own
                self._send(Kind.COMPLETED, series, own)
        level = own
        for i, (sent, step) in enumerate(zip(self._acknowledgements, self.rounds, strict=True)):
            if sent < self._asked <= level:
                self._acknowledgements[i] = level
                for rank in step.receivers:
                    self._send(Kind.ACKNOWLEDGED, Series.COLLECTIVE, level, b"", rank)
            level = min([level, *(self._acknowledged_by.get(rank, -1) for rank in step.senders)])
        self.acknowledged = level

    def _send(
        self,
        kind: Kind,
        series: Series,
        number: int,
        content: bytes = b"",
        rank: int | None = None,
        backwards: bool = False,
    ) -> None:
        """Send a message that begins at this rank to ``rank``, or to all."""
        message = self._pack(kind, series, number, content, target=rank, backwards=backwards)
        if rank is None:
            self._spread(message)
        else:
            self._forward(message, rank, backwards)

    def _forward(self, message: bytes, rank: int, backwards: bool) -> None:
        """Send a message for ``rank`` to it or to a neighbour that is nearer to it."""
        hop: int | None = rank
        if rank not in self._neighbours:
            hop = overlay.next_hop(self.rank, rank, self.size, self._lost, backwards)
        if hop is not None:
            self.outbox.append((hop, message))

    def _send_to_children(self, message: bytes, origin: int) -> None:
        """Send a message that began at ``origin``, which all ranks get once."""
        self.outbox += [(r, message) for r in overlay.children(self.rank, origin, self.size)]

    def _spread(self, message: bytes, source: int | None = None) -> None:
        """Send a message to all neighbours but its sender."""
        self.outbox += [(r, message) for r in sorted(self._neighbours) if r != source]

    def _pack(
        self,
        kind: Kind,
        series: Series,
        number: int,
        content: bytes = b"",
        target: int | None = None,
        backwards: bool = False,
        origin: int | None = None,
    ) -> bytes:
        origin = self.rank if origin is None else origin
        target = _ALL if target is None else target
        return _HEADER.pack(kind, series, backwards, origin, target, number) + content


def _raise(numbers: dict[tuple[int, Series], int], key: tuple[int, Series], number: int) -> bool:
    """Keep the larger number; return whether it is new."""
    if number <= numbers.get(key, -1):
        return False
    numbers[key] = number
    return True
