"""Communicators over another library, made safe by a `ControlChannel` beside it.

A library may hang, crash or mix up data if ranks fail or make different calls. So the ranks send
each other over the channel what they call, how it ends, and that they are alive.
"""

from __future__ import annotations

import atexit
import secrets
import time
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tagi_ddp.communicators.base import BaseCommunicator, E, R
from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.control.mesh import Listener, best_address
from tagi_ddp.communicators.control.notes import Failure, Series
from tagi_ddp.communicators.errors import CommunicatorError, Timeout, timeout_text
from tagi_ddp.communicators.guard import uncaught_error
from tagi_ddp.communicators.operations import Call

W = TypeVar("W", bound="CheckedCommunicator[Any, Any]")

# The numbers of the handshakes that open a channel and a library; those after it are the library's.
_CHANNEL, _LIBRARY = 1, 2


Connect = Callable[[], ControlChannel]
"""Makes the control channel of some ranks, all of which call this."""


class CheckedCommunicator(BaseCommunicator[E, R]):
    """A rank with a control channel; a subclass adds the library and its collectives."""

    def __init__(self, rank: int, size: int, timeout: float, channel: ControlChannel) -> None:
        """Make rank ``rank`` of ``size``; its library is not open yet."""
        super().__init__(rank, size, timeout)
        self._channel = channel
        self._sent: defaultdict[int, int] = defaultdict(int)
        _open.add(self)

    @abstractmethod
    def _transfer(self, handshake: Handshake, data: E, peer: int) -> None:
        """Send to ``peer`` or receive from it, as the call says; the peer does the reverse now."""

    @abstractmethod
    def _part(self, call: Call, ranks: list[int], token: str, connect: Connect) -> Communicator:
        """Return a communicator of ``ranks``, which call this now, and alone know ``token``."""

    @abstractmethod
    def _library_close(self, clean: bool) -> None:
        """Free the library; unless ``clean``, do not wait for operations that may be stuck."""

    def check(self) -> None:
        """Raise the error that would end the next operation, if it is known; do not wait."""
        super().check()
        self._handshake(Call("check", "", 0.0, number=self._numbers["collectives"] + 1)).check()

    def _message(self, call: Call, data: E, peer: int) -> None:
        handshake = self._handshake(call)
        handshake.compare()
        self._transfer(handshake, data, peer)
        if call.name == "send":
            self._sent[peer] = call.number
        else:
            handshake.leave()

    def _barrier(self, call: Call) -> None:
        handshake = self._handshake(call)
        handshake.compare()
        handshake.leave()

    def _split(self, call: Call, color: int | None, key: int) -> Communicator | None:
        with closing(Listener(one_host=self._channel.one_host)) as listener:
            own = [color, key, listener.record.decode(), secrets.token_hex(16)]
            handshake = self._handshake(call)
            all_ranks = handshake.gather(own)
            part: Communicator | None = None
            if color is not None:
                order = sorted((all_ranks[r][1], r) for r in all_ranks if all_ranks[r][0] == color)
                ranks = [rank for _, rank in order]
                records = [all_ranks[rank][2].encode() for rank in ranks]
                connect = partial(self._connect_part, listener, ranks, records, call)
                part = self._part(call, ranks, all_ranks[ranks[0]][3], connect)
        handshake.leave()
        return part

    def _connect_part(
        self, listener: Listener, ranks: list[int], records: list[bytes], call: Call
    ) -> ControlChannel:
        hosts = [self._channel.hosts[rank] for rank in ranks]
        channel, missing = _connect(listener, ranks.index(self.rank), records, hosts, call)
        if missing:
            absent = [ranks[r] for r in missing]
            what = timeout_text(absent, call.limit)
            raise Timeout(f"{self._where(call.title)}: {what}", absent)
        channel.address = self._channel.address
        return channel

    # Handshakes, and the end.

    def _handshake(self, call: Call) -> Handshake:
        return Handshake(self._channel, self._where(call.title), call, lambda: self._failure)

    def _announce(self, error: CommunicatorError, reason: str) -> None:
        self._channel.fail(Failure(type(error).__name__, error.ranks, reason))

    def _leave(self) -> None:
        # The others may still be reading data that this rank has sent.
        with self._channel.sending() as notes:
            notes.acknowledge()
        self._channel.until(self._is_all_received, time.monotonic() + self.timeout)
        clean = self._failure is None and not notes.failures
        self._library_close(clean)
        self._channel.close()
        _open.discard(self)

    def _is_all_received(self) -> bool:
        notes = self._channel.notes
        if self._failure is not None or notes.failures or notes.died:
            return True
        return notes.acknowledged >= notes.own and all(
            notes.completed.get((rank, Series.RECV), 0) >= sent
            for rank, sent in self._sent.items()
            if rank not in notes.closed
        )

    def end_with_process(self) -> None:
        """Close; if the process ends by an error or in an operation, abort before."""
        if self._is_forked():
            return
        reason = uncaught_error()
        if reason is None and self._inside:
            reason = "the process ends while another thread is in an operation"
        if reason is not None:
            self.abort(reason)
        self.close()


_open: weakref.WeakSet[CheckedCommunicator[Any, Any]] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Close every open communicator at the end of this process."""
    for communicator in list(_open):
        communicator.end_with_process()


def open_channel(
    where: str,
    rank: int,
    hosts: Sequence[str],
    call: Call,
    exchange: Callable[[bytes], Sequence[bytes]],
    secret: bytes = b"",
) -> ControlChannel:
    """Return this rank's control channel to all others; rank r runs on ``hosts[r]``.

    ``where`` begins the text of an error. ``exchange(record)`` returns every rank's record, or
    raises. ``secret`` is the job's, if strangers may read records.
    """
    with closing(Listener(secret, one_host=len(set(hosts)) == 1)) as listener:
        records = exchange(listener.record)
        channel, missing = _connect(listener, rank, records, hosts, call)
    if missing:
        raise Timeout(f"{where}: {timeout_text(missing, call.limit)}", missing)
    # Only neighbours on other hosts know this host's address, and not every rank has one.
    handshake = Handshake(channel, where, replace(call, number=_CHANNEL), lambda: None)
    addresses = handshake.gather(channel.address)
    channel.address = best_address(a for r, a in addresses.items() if hosts[r] == hosts[rank])
    return channel


def _connect(
    listener: Listener, rank: int, records: Sequence[bytes], hosts: Sequence[str], call: Call
) -> tuple[ControlChannel, list[int]]:
    """Return this rank's channel and the missing neighbours; if there are any, it is closed."""
    connections, missing = listener.connect(rank, records, call.deadline)
    channel = ControlChannel(connections, rank, hosts)
    if missing:
        reason = timeout_text(missing, call.limit)
        channel.fail(Failure(Timeout.__name__, tuple(missing), reason))
        channel.close()
    return channel, missing


def opened(communicator: W, open_library: Callable[[Call], None], call: Call) -> W:
    """Return ``communicator`` once ``open_library`` has run; report a failure to all ranks."""
    call = replace(call, name="init", number=_LIBRARY)
    try:
        open_library(call)
        handshake = communicator._handshake(replace(call, number=0))
        handshake.compare()
        handshake.leave()
    except BaseException as error:
        communicator.abort(f"init ended in {error!r}")
        communicator.close()
        raise
    return communicator
