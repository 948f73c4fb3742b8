"""One operation of a `CheckedCommunicator`: its ranks call the same, or one is named."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from tagi_ddp.communicators import errors
from tagi_ddp.communicators.control import overlay
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.mesh import SILENCE
from tagi_ddp.communicators.control.notes import Series
from tagi_ddp.communicators.errors import CommunicatorError, Mismatch, PeerLost, Timeout
from tagi_ddp.communicators.operations import Call, Ready

_SLICE = 0.02  # seconds in the library between two reads of the control channel
_PATIENCE = 0.1  # seconds for the library to compare calls before the control channel does, too
# Seconds in which messages should explain an error of the library: the end of a rank, and the
# silence of a host.
_GRACE, _GRACE_OF_HOSTS = 2.0, SILENCE + 2.0
_SHARED = {kind.__name__: kind for kind in (Timeout, PeerLost, Mismatch)}
# The series in which a rank and its peer number a message.
_MESSAGES = {"send": (Series.SEND, Series.RECV), "recv": (Series.RECV, Series.SEND)}


class Differ(Exception):
    """Ranks do not make the same call."""


class Handshake:
    """One operation of this rank with its peers; errors name the ranks at fault.

    ``where`` begins their texts. ``failure`` returns the error that has broken this rank's
    communicator, if one has.
    """

    def __init__(
        self,
        channel: ControlChannel,
        where: str,
        call: Call,
        failure: Callable[[], CommunicatorError | None],
    ) -> None:
        """Prepare; nothing is sent yet."""
        self.call = call
        self._channel = channel
        self._notes = channel.notes
        self.where = where
        self._rank = channel.rank
        self._failure = failure
        self._announced = False
        # All ranks exchange their calls in rounds between neighbours; two do so in one round.
        self._rounds, self._round = self._notes.rounds, self._notes.all_others
        self._own = self._theirs = Series.COLLECTIVE
        if call.peer is not None:
            self._round = overlay.Round(1, (call.peer,), (call.peer,))
            self._rounds = (self._round,)
            self._own, self._theirs = _MESSAGES[call.name]
        elif call.name == "init" and call.number:
            self._own = self._theirs = Series.SETUP
        self._peers = self._round.senders
        self._present = {channel.rank}  # the ranks that have begun the operation
        self._message = b""
        # The exchange of calls that helps the library's comparison from a time on.
        self._exchange: Iterator[None] | None = None
        self._exchange_at = 0.0

    def compare(self, comparison: Ready | None = None) -> None:
        """Return once all peers have made the same call.

        ``comparison`` waits for a library that compares digests, and may raise `Differ`. None: the
        control channel compares the calls.
        """
        if comparison is None:
            self._finish(self._exchanging({}))
            return
        self.begin()
        try:
            self.wait_for(comparison)
        except Differ:
            self.conclude(agreed=False)
        else:
            self.conclude()

    def begin(self) -> None:
        """Begin an operation that compares the calls by what `wait_for` waits for next.

        If that takes long, or fails, the control channel compares them, too.
        """
        self.call.waits_for = self._missing
        if self._notes.failures:  # What those ranks have sent could complete this operation.
            self.check()
        self._exchange = self._exchanging({})
        self._exchange_at = time.monotonic() + min(_PATIENCE, self.call.limit / 4)

    @property
    def digest(self) -> bytes:
        """8 bytes that are equal for equal calls."""
        return hashlib.blake2b(str(self.call).encode(), digest_size=8).digest()

    def conclude(self, agreed: bool = True) -> None:
        """End the comparison; unless ``agreed``, raise Mismatch that names what differs."""
        exchange, self._exchange = self._exchange, None
        if agreed:
            self._present.update(self._peers)
            if self._notes.entered:  # by ranks that sent their calls, too
                with self._channel.sending() as notes:
                    notes.forget(self.call.number)
        elif exchange is not None:
            self._finish(exchange)

    def gather(self, content: Any) -> dict[int, Any]:
        """Compare the calls, and return the small ``content`` of each rank."""
        contents = {self._rank: content}
        self._finish(self._exchanging(contents))
        return contents

    def _finish(self, exchange: Iterator[None]) -> None:
        self.call.waits_for = self._missing
        for _ in exchange:
            if not self._until(self._senders_here, self.call.deadline):
                self._time_out(self._missing())

    def _exchanging(self, contents: dict[int, Any]) -> Iterator[None]:
        """Send this call in rounds, and gather ``contents``; yield while messages are missing."""
        call, notes = self.call, self._notes
        for step in self._rounds:
            self._round = step
            self._message = json.dumps([call.name, call.arguments, contents]).encode()
            with self._channel.sending():
                notes.enter(step.receivers, self._own, call.number, self._message)
            while not self._channel.until(self._senders_here, 0.0):
                yield
            for rank in step.senders:
                message = notes.entered.pop((rank, self._theirs, call.number))
                self._present.update(self._known_to(rank))
                if contents:
                    received = json.loads(message)[2]
                    contents |= {int(other): content for other, content in received.items()}

    def _until(self, ready: Callable[[], bool], end: float) -> bool:
        """Wait for messages until ``end`` at most; after half of the limit, report that."""
        call, until = self.call, self._channel.until
        half = call.deadline - call.limit / 2
        until(lambda: ready() or self._is_asked(), min(end, half))
        if ready():
            return True
        if time.monotonic() >= half or self._is_asked():
            self._announce()
        return until(ready, end)

    def _known_to(self, rank: int) -> list[int]:
        """Return the ranks that have begun the operation if a message of ``rank`` is here."""
        return overlay.span(rank, self._round.known, self._notes.size)

    def check(self) -> None:
        """Raise the error, if there is one already, that would end the operation."""

        def checked() -> bool:
            self._check(self._peers, self._gone())
            return True

        self._channel.until(checked, 0.0)

    def wait_for(self, ready: Ready) -> None:
        """Wait until the library is done, and read messages meanwhile."""
        self.call.waits_for = self._missing
        while True:
            try:
                if ready(_SLICE):
                    return
            except RuntimeError as error:
                self.explain(error)
            self.poll()

    def leave(self) -> None:
        """Complete the operation; report that to the peer of a message."""
        with self._channel.sending() as notes:
            notes.leave(self._own, self.call.number, self.call.peer)

    def poll(self) -> None:
        """Raise the error of the operation, or Timeout at its deadline."""
        call = self.call
        exchange = self._exchange if time.monotonic() > self._exchange_at else None
        if exchange is None or next(exchange, True):  # True: it has ended
            self._channel.until(self._interrupted, 0.0)
        now = time.monotonic()
        if now > call.deadline - call.limit / 2 or self._is_asked():
            self._announce()
        if now > call.deadline:
            self._time_out(call.waits_for())

    def _announce(self) -> None:
        """Report once that this rank waits: ranks that do not report that are at fault."""
        if self._announced:
            return
        self._announced = True
        call, peer = self.call, self.call.peer
        with self._channel.sending() as notes:
            notes.wait(self._own, call.number, peer)
            if peer is not None and peer not in self._present:
                notes.resend(peer, self._own, call.number, self._message)

    def _is_asked(self) -> bool:
        """Return whether another rank has reported that it waits."""
        if self._announced or self._own is not Series.COLLECTIVE:
            return False
        number = self.call.number
        waiting = self._notes.waiting
        return any(s is self._own and waiting[r, s] >= number for r, s in list(waiting))

    def _gone(self) -> set[int]:
        return self._notes.gone(self._own, self.call.number)

    def _absent(self) -> list[int]:
        entered, present = self._notes.entered, set(self._present)
        for rank in self._round.senders:
            if (rank, self._theirs, self.call.number) in entered:
                present.update(self._known_to(rank))
        return [rank for rank in self._peers if rank not in present]

    def _unfinished(self) -> list[int]:
        completed = self._notes.completed
        return [r for r in self._peers if completed.get((r, self._theirs), -1) < self.call.number]

    def _missing(self) -> list[int]:
        """Return the ranks for which the others wait."""
        absent = self._absent()
        return self._at_fault(absent or self._unfinished()) or absent

    def _at_fault(self, ranks: list[int]) -> list[int]:
        """Return those of ``ranks`` that have not reported that they wait."""
        completed, waiting = self._notes.completed, self._notes.waiting
        keys = [(rank, self._theirs) for rank in ranks]
        return [key[0] for key in keys if waiting.get(key, -1) <= completed.get(key, -1)]

    def _senders_here(self) -> bool:
        call, notes = self.call, self._notes
        complete = True
        others: dict[int, str] = {}
        for rank in self._round.senders:
            message = notes.entered.get((rank, self._theirs, call.number))
            if message is None:
                complete = False
            elif message != self._message:
                name, arguments, _ = json.loads(message)
                # The series of messages pair a send with a recv, whose names differ.
                if arguments != call.arguments or (name != call.name and call.peer is None):
                    others |= dict.fromkeys(self._known_to(rank), f"{name}({arguments})")
        if others:
            raise self._mismatch(others)
        self._check([] if complete else self._absent(), self._gone())
        return complete

    def _mismatch(self, others: dict[int, str]) -> Mismatch:
        """Return the error for the calls of ``others``, by rank."""
        what = errors.mismatch_text(others, str(self.call))
        return Mismatch(f"{self.where}: {what}", sorted(others))

    def _interrupted(self) -> bool:
        # A rank that took part and then closed had done its share before.
        closed = self._gone().intersection(self._absent())
        self._check(self._unfinished(), self._notes.died | closed)
        return False

    def _check(self, needed: Sequence[int], gone: set[int]) -> None:
        """Raise if this rank or another has failed, or if a needed one is gone."""
        failure = self._failure()
        if failure is not None:
            raise type(failure)(f"{self.where}: stopped ({failure})", failure.ranks)
        if self._notes.failures:
            self._check_failures()
        if died := [rank for rank in needed if rank in gone & self._notes.died]:
            raise PeerLost(f"{self.where}: {errors.died_text(died)}", died)
        if closed := [rank for rank in needed if rank in gone]:
            raise PeerLost(f"{self.where}: {errors.closed_text(closed[0])}", closed)

    def _check_failures(self) -> None:
        # A peer that has completed this operation failed in a later one.
        completed = set(self._peers).difference(self._unfinished())
        failures = {r: f for r, f in self._notes.failures.items() if r not in completed}
        for rank, failure in failures.items():
            kind, ranks = _SHARED.get(failure.error, PeerLost), list(failure.ranks) or [rank]
            called = errors.own_call(failure.reason)
            differs = called is not None and called != str(self.call) and self.call.peer is None
            if differs and self._rank not in ranks:
                # Its call differs from that of this rank, too, which it had not received.
                raise self._mismatch({rank: str(called)})
            if self._rank in ranks:  # They gave up on this rank, or differ from it.
                kind = Mismatch if kind is Mismatch else PeerLost
                ranks = [r for r, f in failures.items() if self._rank in f.ranks]
            what = errors.forwarded(kind, failure.ranks or [rank], rank, failure.reason, self._rank)
            raise kind(f"{self.where}: {what}", ranks)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the cause, as messages know it, of an error of the library in the block."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise the cause of a library's error, as messages know it; else the error itself."""
        call = self.call
        late = time.monotonic() > call.deadline - _SLICE  # The library has the same limit.
        try:
            grace = _GRACE if self._channel.one_host else _GRACE_OF_HOSTS
            end = min(call.deadline, time.monotonic() + grace)
            for _ in self._exchange or ():
                if not self._channel.until(self._senders_here, end):
                    break
            if not isinstance(error, Mismatch):
                self._channel.until(self._interrupted, end)
            if late:
                self._time_out(self._at_fault(self._unfinished()))
        except CommunicatorError as reason:
            raise reason from None  # The library's error follows from it.
        if isinstance(error, CommunicatorError):
            raise type(error)(f"{self.where}: {error}", error.ranks) from error
        raise CommunicatorError(f"{self.where}: the backend failed: {error}") from error

    def _last_call(self) -> str:
        """Return the last collective of the ranks for which the others wait; "" if not known.

        All ranks have made the one before this, as all calls of each are compared.
        """
        if self.call.peer is not None:
            return ""
        return self.call.previous if self._absent() else self.call.title

    def _time_out(self, missing: list[int]) -> NoReturn:
        limit = self.call.limit
        what = f"all ranks came, but the data did not within {limit:g} s. Look at the network."
        if missing:
            what = errors.timeout_text(missing, limit, self._last_call())
        raise Timeout(f"{self.where}: {what}", missing)
