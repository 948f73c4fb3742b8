"""What a rank of a group knows of the others, and what it passes on; it moves no bytes itself.

All that happens to a group travels as messages between neighbours (`overlay`): some to one rank,
by way of others where the two are no neighbours; some to all. News of failures and ends take every
way there is, so those that wait hear of them whoever is stuck in between.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from tagi_ddp.communicators.control import overlay

_HEADER = struct.Struct("!BBBIIQ")  # kind, series, way, origin, target, number; the content follows
_ALL = 2**32 - 1  # as a target


class Kind(IntEnum):
    """What a message says."""

    ENTER = 1  # I call this operation, with this signature; so do those whom I know of
    THROUGH = 2  # I am through with it, and all before it
    WAITING = 3  # I am still in it, though it takes long
    FAIL = 4  # I failed, or give up
    KEEP = 5  # keep this value under this key
    BYE = 6  # I close my communicator
    DIED = 7  # the connection of this rank has ended
    SETTLED = 8  # I am through with it, and so are those whom I know of


class Series(IntEnum):
    """Which operations a number counts."""

    SETUP = 0
    COLLECTIVE = 1
    SEND = 2  # data that the sender of the message sends
    RECV = 3  # data that it receives


@dataclass(frozen=True)
class Failure:
    """What a rank said when it failed: the type of its error, the ranks it blames, and why."""

    error: str
    ranks: tuple[int, ...]
    reason: str


class Notes:
    """The notes of ``rank`` of ``size``. What is to be sent lies in ``outbox``."""

    def __init__(self, rank: int, size: int) -> None:
        """Know nothing yet of the others."""
        self.rank = rank
        self.size = size
        self.rounds = overlay.rounds(rank, size)
        others = tuple(r for r in range(size) if r != rank)
        self.all_others = overlay.Round(1, others, others)
        self.outbox: deque[tuple[int, bytes]] = deque()
        """Messages, each with the neighbour it goes to."""
        self.entered: dict[tuple[int, Series, int], bytes] = {}
        """The messages of operations not yet begun, by rank, series and number."""
        self.through: dict[tuple[int, Series], int] = {}
        """The number of the last operation that a rank is known to be through with."""
        self.waiting: dict[tuple[int, Series], int] = {}
        """The number of the last operation that a rank said to be still in."""
        self.failures: dict[int, Failure] = {}
        self.values: dict[str, bytes] = {}
        """The values that ranks asked all others to keep."""
        self.closed: set[int] = set()
        self.died: set[int] = set()
        self.settled = -1
        """The number of the last collective that all are known to have left, once one asks."""
        self._neighbours = set(overlay.neighbours(rank, size))
        self._lost: set[int] = set()  # neighbours without a connection
        self._told = -1  # how far this rank has said to be
        self._asked = -1  # how far some rank wants all to be
        self._settled_by: dict[int, int] = {}  # neighbours, and all whom they know of
        self._said = [-1] * len(self.rounds)

    # What this rank says.

    def enter(self, ranks: Iterable[int], series: Series, number: int, content: bytes) -> None:
        """Tell ``ranks`` that this one has come."""
        for rank in ranks:
            self._send(Kind.ENTER, series, number, content, rank)

    def remind(self, rank: int, series: Series, number: int, content: bytes) -> None:
        """Say the same to a rank again, by way of others: those may be the ones that are stuck."""
        if rank not in self._neighbours:
            self._send(Kind.ENTER, series, number, content, rank, way=1)

    def wait(self, series: Series, number: int, rank: int | None = None) -> None:
        """Tell ``rank``, or all, that this one waits, so that it is not to blame."""
        self.waiting[self.rank, series] = number
        self._send(Kind.WAITING, series, number, b"", rank)

    def leave(self, series: Series, number: int, rank: int | None = None) -> None:
        """Be through with an operation; tell ``rank``, or else those that ask for it."""
        _raise(self.through, (self.rank, series), number)
        if rank is not None:
            self._send(Kind.THROUGH, series, number, b"", rank)
        if self.waiting or self._asked >= 0:
            self._answer()

    def forget(self, number: int) -> None:
        """Forget who came to collectives up to this one, which met without their messages."""
        for place in [p for p in self.entered if p[1] is Series.COLLECTIVE and p[2] <= number]:
            del self.entered[place]

    def settle(self, number: int) -> None:
        """Have all ranks say when they are through with a collective; see ``settled``."""
        self._asked = max(self._asked, number)
        self._answer()

    def fail(self, failure: Failure) -> None:
        """Tell all ranks."""
        content = json.dumps([failure.error, failure.ranks, failure.reason]).encode()
        self._send(Kind.FAIL, Series.COLLECTIVE, self._own() + 1, content)

    def keep(self, key: str, value: bytes) -> None:
        """Have all ranks keep ``value``."""
        self.values[key] = value
        content = json.dumps([key, value.hex()]).encode()
        message = self._pack(Kind.KEEP, Series.SETUP, 0, content)
        self.outbox += [(r, message) for r in overlay.children(self.rank, self.rank, self.size)]

    def bye(self) -> None:
        """Tell all ranks that this one closes."""
        self._send(Kind.BYE, Series.COLLECTIVE, self._own() + 1)

    # What it hears.

    def lose(self, neighbour: int) -> None:
        """Know that the connection to a neighbour has ended."""
        self._lost.add(neighbour)
        if neighbour not in self.closed | self.died:
            self.died.add(neighbour)
            self._spread(self._pack(Kind.DIED, Series.SETUP, 0, origin=neighbour), neighbour)

    def take(self, neighbour: int, message: bytes) -> None:
        """Read a message of a neighbour, or of another rank that it passes on.

        Raises ValueError or struct.error for what is none.
        """
        code, count, way, origin, target, number = _HEADER.unpack_from(message)
        kind, series, content = Kind(code), Series(count), message[_HEADER.size :]
        if target not in (self.rank, _ALL):
            hop = overlay.next_hop(self.rank, target, self.size, self._lost, bool(way))
            if hop is not None:
                self.outbox.append((hop, message))
            return
        news = self._note(kind, series, origin, number, content)
        if news and target == _ALL:
            if kind is Kind.KEEP:
                self.outbox += [(r, message) for r in self._children(origin)]
            else:
                self._spread(message, neighbour)
        self._answer()

    def _note(self, kind: Kind, series: Series, origin: int, number: int, content: bytes) -> bool:
        """Write it down; tell whether this rank did not know it."""
        place = origin, series
        if kind is Kind.ENTER:
            self.entered[origin, series, number] = content
        elif kind is Kind.SETTLED:
            self._settled_by[origin] = number
            self._asked = max(self._asked, number)
        elif kind is Kind.WAITING:
            return _raise(self.waiting, place, number)
        elif kind is Kind.THROUGH:
            return _raise(self.through, place, number)
        elif kind is Kind.FAIL:
            _raise(self.through, place, number - 1)
            if origin in self.failures:
                return False
            error, ranks, reason = json.loads(content)
            self.failures[origin] = Failure(error, tuple(ranks), reason)
        elif kind is Kind.KEEP:
            key, value = json.loads(content)
            self.values[key] = bytes.fromhex(value)
        else:
            if origin in self.closed | self.died:
                return False
            _raise(self.through, place, number - 1)
            (self.died if kind is Kind.DIED else self.closed).add(origin)
        return True

    def gone(self, series: Series, number: int) -> set[int]:
        """Return the ranks that will not come to an operation, nor go on with it."""
        return self.died | {
            rank
            for rank in self.closed
            if series is not Series.COLLECTIVE or self.through.get((rank, series), -1) < number
        }

    # How it tells.

    def _own(self) -> int:
        return self.through.get((self.rank, Series.COLLECTIVE), -1)

    def _answer(self) -> None:
        """Say how far this rank is, if one waits for that or wants to know of all."""
        own = self._own()
        for (_, series), number in self.waiting.items():
            if series is Series.COLLECTIVE and self._told < number <= own:
                self._told = own
                self._send(Kind.THROUGH, series, own)
        level = own
        for i, (said, step) in enumerate(zip(self._said, self.rounds, strict=True)):
            if said < self._asked <= level:
                self._said[i] = level
                for rank in step.receivers:
                    self._send(Kind.SETTLED, Series.COLLECTIVE, level, b"", rank)
            level = min([level, *(self._settled_by.get(rank, -1) for rank in step.senders)])
        self.settled = level

    def _children(self, origin: int) -> list[int]:
        return overlay.children(self.rank, origin, self.size)

    def _send(
        self,
        kind: Kind,
        series: Series,
        number: int,
        content: bytes = b"",
        rank: int | None = None,
        way: int = 0,
    ) -> None:
        """Send a message of this rank's own to ``rank``, or to all."""
        message = self._pack(kind, series, number, content, target=rank, way=way)
        if rank is None:
            self._spread(message)
            return
        hop: int | None = rank
        if rank not in self._neighbours:
            hop = overlay.next_hop(self.rank, rank, self.size, self._lost, bool(way))
        if hop is not None:
            self.outbox.append((hop, message))

    def _spread(self, message: bytes, source: int | None = None) -> None:
        """Send a message to all neighbours but the one that it is from."""
        self.outbox += [(r, message) for r in sorted(self._neighbours) if r != source]

    def _pack(
        self,
        kind: Kind,
        series: Series,
        number: int,
        content: bytes = b"",
        target: int | None = None,
        way: int = 0,
        origin: int | None = None,
    ) -> bytes:
        origin = self.rank if origin is None else origin
        target = _ALL if target is None else target
        return _HEADER.pack(kind, series, way, origin, target, number) + content


def _raise(numbers: dict[tuple[int, Series], int], place: tuple[int, Series], number: int) -> bool:
    """Keep the larger number; tell whether it is new."""
    if number <= numbers.get(place, -1):
        return False
    numbers[place] = number
    return True
