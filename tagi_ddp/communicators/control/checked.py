"""Communicators over another library, made safe by a `ControlChannel` beside it.

An engine may hang, crash or mix up data when ranks fail or do not call the same. So the ranks tell
each other over the channel what they call, how it ends, and that they are still there.
"""

from __future__ import annotations

import atexit
import time
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

from tagi_ddp.communicators.base import BaseCommunicator, E, R
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.control.mesh import Listener, best_address, host_id
from tagi_ddp.communicators.control.notes import Failure, Series
from tagi_ddp.communicators.errors import CommunicatorError, Timeout, timeout_text
from tagi_ddp.communicators.guard import last_words

W = TypeVar("W", bound="CheckedCommunicator[Any, Any]")


class CheckedCommunicator(BaseCommunicator[E, R]):
    """A rank with a control channel; a subclass adds the engine and its collectives."""

    def __init__(self, rank: int, size: int, timeout: float, channel: ControlChannel) -> None:
        """Make rank ``rank`` of ``size``; its engine is yet to be opened."""
        super().__init__(rank, size, timeout)
        self._channel = channel
        self._others = [r for r in range(size) if r != rank]
        self._copied = 0  # the last collective that used the engine
        self._sent: defaultdict[int, int] = defaultdict(int)
        _open.add(self)

    @abstractmethod
    def _engine_send(self, handshake: Handshake, data: E, dst: int) -> None:
        """Send to ``dst``, which receives now; ``handshake`` waits for the engine."""

    @abstractmethod
    def _engine_recv(self, handshake: Handshake, data: E, src: int) -> None:
        """Receive from ``src``, which sends now."""

    @abstractmethod
    def _engine_split(self: W, call: Call, color: int | None, key: int, part: W | None) -> None:
        """Open the engine of ``part``; on a rank that is in no part it is None."""

    @abstractmethod
    def _engine_close(self, clean: bool) -> None:
        """Free the engine; unless ``clean``, without waiting for what may be stuck in it."""

    def _part(self: W, rank: int, size: int, channel: ControlChannel) -> W:
        """Return a communicator of some of the ranks, whose engine is yet to be opened."""
        return type(self)(rank, size, self.timeout, channel)

    def check(self) -> None:
        """Raise what this rank knows already that would end the next operation; nobody waits."""
        super().check()
        self._handshake(Call("check", "", 0.0, number=self._numbers["collectives"] + 1)).check()

    def _send(self, call: Call, data: E, dst: int) -> None:
        handshake = self._handshake(call, [dst], (Series.SEND, Series.RECV))
        handshake.meet()
        self._engine_send(handshake, data, dst)
        self._sent[dst] = call.number

    def _recv(self, call: Call, data: E, src: int) -> None:
        handshake = self._handshake(call, [src], (Series.RECV, Series.SEND))
        handshake.meet()
        self._engine_recv(handshake, data, src)
        handshake.leave()

    def _barrier(self, call: Call) -> None:
        self._enter(call).leave()

    def _split(self: W, call: Call, color: int | None, key: int) -> W | None:
        with closing(Listener(one_host=self._channel.one_host)) as listener:
            own = [color, key, listener.record.decode()]
            handshake = self._handshake(call)
            messages = {**handshake.gather(own), self.rank: own}
            part: W | None = None
            if color is not None:
                members = sorted((messages[r][1], r) for r in messages if messages[r][0] == color)
                ranks = [rank for _, rank in members]
                records = [messages[rank][2].encode() for rank in ranks]
                rank = ranks.index(self.rank)
                hosts = [self._channel.hosts[rank] for rank in ranks]
                channel, missing = _connect(listener, rank, records, hosts, call)
                if missing:
                    absent = [ranks[r] for r in missing]
                    what = timeout_text(absent, call.limit)
                    raise Timeout(f"{self._where(call.title)}: {what}", absent)
                channel.address = self._channel.address
                part = self._part(rank, len(ranks), channel)
        try:
            self._engine_split(call, color, key, part)
        except BaseException as error:
            if part is not None:
                part.abort(f"{call.title} ended in {error!r}")
                part.close()
            raise
        handshake.leave()
        return part

    # Handshakes, and the end.

    def _enter(self, call: Call) -> Handshake:
        """Return the handshake of all ranks for ``call`` once they have come."""
        handshake = self._handshake(call)
        handshake.meet()
        return handshake

    def _handshake(
        self,
        call: Call,
        peers: list[int] | None = None,
        series: tuple[Series, Series] = (Series.COLLECTIVE, Series.COLLECTIVE),
    ) -> Handshake:
        return Handshake(
            self._channel,
            self._where(call.title),
            self.rank,
            call,
            self._others if peers is None else peers,
            series,
            lambda: self._failure,
        )

    def _announce(self, error: CommunicatorError, reason: str) -> None:
        self._channel.fail(Failure(type(error).__name__, error.ranks, reason))

    def _leave(self) -> None:
        # The others may still be reading what this rank's engine sent.
        with self._channel.telling() as notes:
            notes.settle(self._copied)
        self._channel.until(self._all_through, time.monotonic() + self.timeout)
        clean = self._failure is None and not notes.failures
        self._engine_close(clean)
        self._channel.close()
        _open.discard(self)

    def _all_through(self) -> bool:
        notes = self._channel.notes
        if self._failure is not None or notes.failures or notes.died:
            return True
        return notes.settled >= self._copied and all(
            notes.through.get((rank, Series.RECV), 0) >= sent
            for rank, sent in self._sent.items()
            if rank not in notes.closed
        )

    def end_with_process(self) -> None:
        """Close; abort first, so that the others learn the reason, if an error ends the process."""
        if self._is_forked():
            return
        if (reason := last_words()) is not None:
            self.abort(reason)
        self.close()


_open: weakref.WeakSet[CheckedCommunicator[Any, Any]] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Close every open communicator of this process, which ends."""
    for communicator in list(_open):
        communicator.end_with_process()


def open_channel(
    backend: str,
    rank: int,
    size: int,
    timeout: float,
    deadline: float,
    exchange: Callable[[bytes], Sequence[bytes]],
    secret: bytes = b"",
) -> ControlChannel:
    """Return this rank's control channel to all others.

    ``exchange(record)`` returns every rank's record; it raises what keeps it from that. ``secret``
    is the job's, where strangers may read records.
    """
    where = f"init on rank {rank} of {size} ({backend})"
    call = Call("init", "", timeout, deadline=deadline)
    hosts = [host.decode() for host in exchange(host_id().encode())]
    with closing(Listener(secret, one_host=len(set(hosts)) == 1)) as listener:
        records = exchange(listener.record)
        channel, missing = _connect(listener, rank, records, hosts, call)
    if missing:
        raise Timeout(f"{where}: {timeout_text(missing, timeout)}", missing)
    # Not every rank has neighbours on other hosts, which tell it by what address they reach it.
    others = [r for r in range(size) if r != rank]
    series = Series.SETUP, Series.SETUP
    told = Handshake(channel, where, rank, call, others, series, lambda: None).gather(
        channel.address
    )
    told[rank] = channel.address
    channel.address = best_address(told[r] for r in range(size) if hosts[r] == hosts[rank])
    return channel


def _connect(
    listener: Listener, rank: int, records: Sequence[bytes], hosts: Sequence[str], call: Call
) -> tuple[ControlChannel, list[int]]:
    """Return this rank's channel, and the neighbours that did not come; then it is closed."""
    connections, missing = listener.connect(rank, records, call.deadline)
    channel = ControlChannel(connections, rank, hosts)
    if missing:
        reason = timeout_text(missing, call.limit)
        channel.fail(Failure(Timeout.__name__, tuple(missing), reason))
        channel.close()
    return channel, missing


def opened(comm: W, open_engine: Callable[[Call], None], timeout: float, deadline: float) -> W:
    """Return ``comm`` with its engine open; if that fails, the other ranks learn why."""
    try:
        open_engine(Call("init", "", timeout, deadline=deadline))
    except BaseException as error:
        comm.abort(f"init ended in {error!r}")
        comm.close()
        raise
    return comm
