"""One operation of a `CheckedCommunicator`: the ranks that must come, have come, are through."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tagi_ddp.communicators import errors
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.control.channel import ControlChannel, Kind, Series
from tagi_ddp.communicators.errors import CommunicatorError, Mismatch, PeerLost, Timeout

_SLICE = 0.02  # seconds in the engine between two looks at the messages
_GRACE = 2.0  # seconds in which the messages should explain an engine's error
_SHARED = {kind.__name__: kind for kind in (Timeout, PeerLost, Mismatch)}


Ready = Callable[[float], bool]
"""Waits up to some seconds for an engine; tells whether it is done; raises its RuntimeError."""


class Handshake:
    """The part of ``peers`` in ``call``; raises what went wrong, naming the ranks at fault.

    ``own`` and ``theirs`` are the series on which this rank and its peers count the operation;
    ``failure`` returns the error that broke this rank's communicator meanwhile, if one did.
    """

    def __init__(
        self,
        channel: ControlChannel,
        where: str,
        rank: int,
        call: Call,
        peers: list[int],
        series: tuple[Series, Series],
        failure: Callable[[], CommunicatorError | None],
    ) -> None:
        """Prepare; nothing is sent yet."""
        self._channel = channel
        self._where = where
        self._rank = rank
        self._call = call
        self._peers = peers
        self._own, self._theirs = series
        self._failure = failure
        self._announced = False
        self._said = b""

    def gather(self, content: Any) -> dict[int, Any]:
        """Tell this call and a small ``content`` to the peers; return theirs once all have come."""
        call, channel = self._call, self._channel
        self._said = json.dumps([call.name, call.arguments, content]).encode()
        channel.send(self._peers, Kind.ENTER, self._own, call.number, self._said)
        call.waits_for = self._absent
        if not channel.until(self._all_here, call.deadline - call.limit / 2):
            self._announce()
            if not channel.until(self._all_here, call.deadline):
                self._time_out(self._to_blame(self._absent()) or self._absent())
        messages = {r: channel.entered.pop((r, self._theirs, call.number)) for r in self._peers}
        return {r: content if m == self._said else json.loads(m)[2] for r, m in messages.items()}

    def left(self) -> float:
        """Return the seconds before the deadline, at least a few."""
        return self._call.left()

    def check(self) -> None:
        """Raise what has come that keeps the operation from being carried out."""

        def nothing_came() -> bool:
            self._check(self._peers, self._channel.died | self._channel.closed)
            return True

        self._channel.until(nothing_came, 0.0)

    def carry(self, ready: Ready) -> None:
        """Wait until the engine is done, with an eye on the messages."""
        self._call.waits_for = lambda: self._to_blame(self._unfinished())
        while True:
            try:
                if ready(_SLICE):
                    return
            except RuntimeError as error:
                self.explain(error)
            self._look()

    def leave(self) -> None:
        """Tell the peers that this rank is through."""
        self._channel.send(self._peers, Kind.LEAVE, self._own, self._call.number)

    def _look(self) -> None:
        """Between two waits for the engine: raise what has gone wrong, or that the time is up."""
        call = self._call
        self._channel.until(self._interrupted, 0.0)
        now = time.monotonic()
        if now > call.deadline - call.limit / 2:
            self._announce()
        if now > call.deadline:
            self._time_out(call.waits_for())

    def _announce(self) -> None:
        """Tell the peers, once, that this rank waits: the ranks that do not are to blame."""
        if not self._announced:
            self._announced = True
            self._channel.send(self._peers, Kind.WAITING, self._own, self._call.number)

    def _absent(self) -> list[int]:
        entered = self._channel.entered
        return [r for r in self._peers if (r, self._theirs, self._call.number) not in entered]

    def _unfinished(self) -> list[int]:
        left = self._channel.left
        return [r for r in self._peers if left.get((r, self._theirs), -1) < self._call.number]

    def _to_blame(self, ranks: list[int]) -> list[int]:
        """Return those of ``ranks`` that did not say that they wait, in this call or before."""
        left, waiting = self._channel.left, self._channel.waiting
        series = self._theirs
        return [r for r in ranks if waiting.get((r, series), -1) <= left.get((r, series), -1)]

    def _all_here(self) -> bool:
        call, channel = self._call, self._channel
        absent: list[int] = []
        others: dict[int, str] = {}
        for rank in self._peers:
            message = channel.entered.get((rank, self._theirs, call.number))
            if message is None:
                absent.append(rank)
            elif message != self._said:
                name, arguments, _ = json.loads(message)
                # The series of messages pair a send with a recv, whose names differ.
                if arguments != call.arguments or (name != call.name and not call.peer):
                    others[rank] = f"{name}({arguments})"
        if others:
            what = errors.mismatch_text(others, f"{call.name}({call.arguments})")
            raise Mismatch(f"{self._where}: {what}", sorted(others))
        self._check(absent, channel.died | channel.closed)
        return not absent

    def _interrupted(self) -> bool:
        # A rank that came and closed had done its part before.
        self._check(self._unfinished(), self._channel.died)
        return False

    def _check(self, needed: list[int], gone: set[int]) -> None:
        """Raise if this rank or another failed, or if a needed one is gone."""
        failure = self._failure()
        if failure is not None:
            raise type(failure)(f"{self._where}: stopped ({failure})", failure.ranks)
        if self._channel.failures:
            self._check_failures()
        if died := [rank for rank in needed if rank in gone & self._channel.died]:
            raise PeerLost(f"{self._where}: {errors.died_text(died)}", died)
        if closed := [rank for rank in needed if rank in gone]:
            raise PeerLost(f"{self._where}: {errors.closed_text(closed[0])}", closed)

    def _check_failures(self) -> None:
        # A peer that is through with this operation failed in a later one.
        through = set(self._peers).difference(self._unfinished())
        failures = {r: f for r, f in self._channel.failures.items() if r not in through}
        for rank, said in failures.items():
            kind, ranks = _SHARED.get(said.error, PeerLost), list(said.ranks) or [rank]
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
            self._channel.until(self._interrupted, min(call.deadline, time.monotonic() + _GRACE))
            if late:
                self._time_out(self._to_blame(self._unfinished()))
        except CommunicatorError as reason:
            raise reason from None  # the engine's error follows from it
        raise CommunicatorError(f"{self._where}: the backend failed: {error}") from error

    def _time_out(self, missing: list[int]) -> NoReturn:
        limit = self._call.limit
        what = f"all ranks came, but the data did not within {limit:g} s. Look at the network."
        if missing:
            what = errors.timeout_text(missing, limit)
        raise Timeout(f"{self._where}: {what}", missing)
