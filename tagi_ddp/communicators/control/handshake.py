"""One operation of a `CheckedCommunicator`: the ranks that must come, have come, are through."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tagi_ddp.communicators import errors
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.control import overlay
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.mesh import SILENCE
from tagi_ddp.communicators.control.notes import Series
from tagi_ddp.communicators.errors import CommunicatorError, Mismatch, PeerLost, Timeout

_SLICE = 0.02  # seconds in the engine between two looks at the messages
_PATIENCE = 0.1  # seconds in which ranks that a faster way brings together need not tell each other
# Seconds in which the messages should explain an engine's error: that a rank has ended, and that a
# host has fallen silent.
_GRACE, _GRACE_OF_HOSTS = 2.0, SILENCE + 2.0
_SHARED = {kind.__name__: kind for kind in (Timeout, PeerLost, Mismatch)}


Ready = Callable[[float], bool]
"""Wait up to some seconds for a library; return whether it is done; raise its RuntimeError."""


class Differ(Exception):
    """Ranks do not make the same call."""


class Handshake:
    """The part of ``peers`` in ``call``; raises what went wrong, naming the ranks at fault.

    ``own`` and ``theirs`` are the series on which this rank and its peers count the operation;
    ``failure`` returns the error that broke this rank's communicator meanwhile, if one did.
    """

    def __init__(
        self,
        channel: ControlChannel,
        where: str,
        call: Call,
        peers: list[int],
        series: tuple[Series, Series],
        failure: Callable[[], CommunicatorError | None],
    ) -> None:
        """Prepare; nothing is sent yet."""
        self._channel = channel
        self._notes = channel.notes
        self._where = where
        self._rank = channel.rank
        self._call = call
        self._peers = peers
        self._own, self._theirs = series
        self._failure = failure
        self._announced = False
        # Two ranks tell each other; all come to know of all by way of neighbours.
        self._rounds, self._round = self._notes.rounds, self._notes.all_others
        if call.peer:
            self._round = overlay.Round(1, tuple(peers), tuple(peers))
            self._rounds = (self._round,)
        self._here = {channel.rank}  # the ranks that have come
        self._said = b""
        self._talk: Iterator[None] | None = None  # beside a faster way to meet,
        self._talks_at = 0.0  # from this time on

    def meet(self, comparison: Ready | None = None) -> None:
        """Return once all peers have made the same call.

        ``comparison`` waits for a library that compares their digests, and may raise `Differ`;
        None: the control channel compares the calls.
        """
        if comparison is None:
            self._finish(self._talking({}))
            return
        self.begin()
        try:
            self.carry(comparison)
        except Differ:
            self.met(agreed=False)
        else:
            self.met()

    def begin(self) -> None:
        """Let what is carried next bring all ranks together, which `met` concludes.

        If it takes long, or fails, the ranks send each other their calls as in `meet`.
        """
        self._call.waits_for = self._missing
        if self._notes.failures:  # what those ranks sent before could carry this one through
            self.check()
        self._talk = self._talking({})
        self._talks_at = time.monotonic() + min(_PATIENCE, self._call.limit / 4)

    @property
    def digest(self) -> bytes:
        """8 bytes that are the same for the same calls."""
        call = f"{self._call.name}({self._call.arguments})"
        return hashlib.blake2b(call.encode(), digest_size=8).digest()

    def met(self, agreed: bool = True) -> None:
        """Go on once all have come; unless they ``agreed``, raise who calls something else."""
        talk, self._talk = self._talk, None
        if agreed:
            self._here.update(self._peers)
            if self._notes.entered:  # of those that talked meanwhile
                with self._channel.telling() as notes:
                    notes.forget(self._call.number)
        elif talk is not None:
            self._finish(talk)

    def gather(self, content: Any) -> dict[int, Any]:
        """Meet, and return the small ``content`` of each peer."""
        contents = {self._rank: content}
        self._finish(self._talking(contents))
        return {rank: content for rank, content in contents.items() if rank != self._rank}

    def _finish(self, talk: Iterator[None]) -> None:
        self._call.waits_for = self._missing
        for _ in talk:
            self._await_senders()

    def _talking(self, contents: dict[int, Any]) -> Iterator[None]:
        """Tell this call in rounds, and gather ``contents``; yield until the senders are here."""
        call, notes = self._call, self._notes
        for step in self._rounds:
            self._round = step
            self._said = json.dumps([call.name, call.arguments, contents]).encode()
            with self._channel.telling():
                notes.enter(step.receivers, self._own, call.number, self._said)
            while not self._channel.until(self._senders_here, 0.0):
                yield
            for rank in step.senders:
                message = notes.entered.pop((rank, self._theirs, call.number))
                self._here.update(self._known_to(rank))
                if contents:
                    told = json.loads(message)[2]
                    contents |= {int(other): content for other, content in told.items()}

    def _await_senders(self) -> None:
        if not self._until(self._senders_here, self._call.deadline):
            self._time_out(self._missing())

    def _until(self, ready: Callable[[], bool], end: float) -> bool:
        """Wait for messages until ``end`` at most; if it takes long, tell that this rank waits."""
        call, until = self._call, self._channel.until
        half = call.deadline - call.limit / 2
        until(lambda: ready() or self._is_asked(), min(end, half))
        if ready():
            return True
        if time.monotonic() >= half or self._is_asked():
            self._announce()
        return until(ready, end)

    def _known_to(self, rank: int) -> list[int]:
        """Return the ranks that have come if a message of ``rank`` has."""
        return overlay.span(rank, self._round.known, self._notes.size)

    def left(self) -> float:
        """Return the seconds before the deadline, at least a few."""
        return self._call.left()

    def check(self) -> None:
        """Raise what has come that keeps the operation from being carried out."""

        def nothing_came() -> bool:
            self._check(self._peers, self._gone())
            return True

        self._channel.until(nothing_came, 0.0)

    def carry(self, ready: Ready) -> None:
        """Wait until the engine is done, with an eye on the messages."""
        self._call.waits_for = self._missing
        while True:
            try:
                if ready(_SLICE):
                    return
            except RuntimeError as error:
                self.explain(error)
            self.look()

    def leave(self) -> None:
        """Be through; a peer in a message is told."""
        with self._channel.telling() as notes:
            notes.leave(self._own, self._call.number, self._peer())

    def look(self) -> None:
        """Raise what has gone wrong, or that the time is up."""
        call = self._call
        talk = self._talk if time.monotonic() > self._talks_at else None
        if talk is None or next(talk, True):  # True: it is over
            self._channel.until(self._interrupted, 0.0)
        now = time.monotonic()
        if now > call.deadline - call.limit / 2 or self._is_asked():
            self._announce()
        if now > call.deadline:
            self._time_out(call.waits_for())

    def _announce(self) -> None:
        """Tell, once, that this rank waits: the ranks that do not are to blame."""
        if self._announced:
            return
        self._announced = True
        call, peer = self._call, self._peer()
        with self._channel.telling() as notes:
            notes.wait(self._own, call.number, peer)
            if peer is not None and peer not in self._here:
                notes.remind(peer, self._own, call.number, self._said)

    def _is_asked(self) -> bool:
        """Tell whether another rank has said that it waits, for this one or another."""
        if self._announced or self._own is not Series.COLLECTIVE:
            return False
        number = self._call.number
        waiting = self._notes.waiting
        return any(s is self._own and waiting[r, s] >= number for r, s in list(waiting))

    def _peer(self) -> int | None:
        return self._peers[0] if self._call.peer else None

    def _gone(self) -> set[int]:
        return self._notes.gone(self._own, self._call.number)

    def _absent(self) -> list[int]:
        entered, here = self._notes.entered, set(self._here)
        for rank in self._round.senders:
            if (rank, self._theirs, self._call.number) in entered:
                here.update(self._known_to(rank))
        return [rank for rank in self._peers if rank not in here]

    def _unfinished(self) -> list[int]:
        through = self._notes.through
        return [r for r in self._peers if through.get((r, self._theirs), -1) < self._call.number]

    def _missing(self) -> list[int]:
        """Return the ranks that hold up the others."""
        absent = self._absent()
        return self._to_blame(absent or self._unfinished()) or absent

    def _to_blame(self, ranks: list[int]) -> list[int]:
        """Return those of ``ranks`` that did not say that they wait, in this call or before."""
        through, waiting = self._notes.through, self._notes.waiting
        series = self._theirs
        return [r for r in ranks if waiting.get((r, series), -1) <= through.get((r, series), -1)]

    def _senders_here(self) -> bool:
        call, notes = self._call, self._notes
        here = True
        others: dict[int, str] = {}
        for rank in self._round.senders:
            message = notes.entered.get((rank, self._theirs, call.number))
            if message is None:
                here = False
            elif message != self._said:
                name, arguments, _ = json.loads(message)
                # The series of messages pair a send with a recv, whose names differ.
                if arguments != call.arguments or (name != call.name and not call.peer):
                    others |= dict.fromkeys(self._known_to(rank), f"{name}({arguments})")
        if others:
            what = errors.mismatch_text(others, f"{call.name}({call.arguments})")
            raise Mismatch(f"{self._where}: {what}", sorted(others))
        self._check([] if here else self._absent(), self._gone())
        return here

    def _interrupted(self) -> bool:
        # A rank that came and closed had done its part before.
        closed = self._gone().intersection(self._absent())
        self._check(self._unfinished(), self._notes.died | closed)
        return False

    def _check(self, needed: list[int], gone: set[int]) -> None:
        """Raise if this rank or another failed, or if a needed one is gone."""
        failure = self._failure()
        if failure is not None:
            raise type(failure)(f"{self._where}: stopped ({failure})", failure.ranks)
        if self._notes.failures:
            self._check_failures()
        if died := [rank for rank in needed if rank in gone & self._notes.died]:
            raise PeerLost(f"{self._where}: {errors.died_text(died)}", died)
        if closed := [rank for rank in needed if rank in gone]:
            raise PeerLost(f"{self._where}: {errors.closed_text(closed[0])}", closed)

    def _check_failures(self) -> None:
        # A peer that is through with this operation failed in a later one.
        through = set(self._peers).difference(self._unfinished())
        failures = {r: f for r, f in self._notes.failures.items() if r not in through}
        own = f"{self._call.name}({self._call.arguments})"
        for rank, said in failures.items():
            kind, ranks = _SHARED.get(said.error, PeerLost), list(said.ranks) or [rank]
            called = errors.own_call(said.reason)
            if called not in (None, own) and self._rank not in ranks and not self._call.peer:
                # It differs from this rank too, and blames those of whom it knows.
                what = errors.mismatch_text({rank: str(called)}, own)
                raise Mismatch(f"{self._where}: {what}", [rank])
            if self._rank in ranks:  # they gave up on this rank, or differ from it
                kind = Mismatch if kind is Mismatch else PeerLost
                ranks = [r for r, f in failures.items() if self._rank in f.ranks]
            what = errors.as_told(kind, said.ranks or [rank], rank, said.reason, self._rank)
            raise kind(f"{self._where}: {what}", ranks)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise what the messages say about an error of the engine in the block."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise what the messages say about an engine's error, else the error itself."""
        call = self._call
        late = time.monotonic() > call.deadline - _SLICE  # the engine's own limit is the call's
        try:
            grace = _GRACE if self._channel.one_host else _GRACE_OF_HOSTS
            end = min(call.deadline, time.monotonic() + grace)
            for _ in self._talk or ():
                if not self._channel.until(self._senders_here, end):
                    break
            if not isinstance(error, Mismatch):
                self._channel.until(self._interrupted, end)
            if late:
                self._time_out(self._to_blame(self._unfinished()))
        except CommunicatorError as reason:
            raise reason from None  # the engine's error follows from it
        if isinstance(error, CommunicatorError):
            raise type(error)(f"{self._where}: {error}", error.ranks) from error
        raise CommunicatorError(f"{self._where}: the backend failed: {error}") from error

    def _time_out(self, missing: list[int]) -> NoReturn:
        limit = self._call.limit
        what = f"all ranks came, but the data did not within {limit:g} s. Look at the network."
        if missing:
            what = errors.timeout_text(missing, limit)
        raise Timeout(f"{self._where}: {what}", missing)
