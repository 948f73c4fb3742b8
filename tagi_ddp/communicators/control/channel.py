"""What the ranks of a group tell each other beside the data: where they are, and how they end.

Every operation begins with a message to the ranks that take part, and its data moves only when
their messages have come and fit. So a rank that does not come, differs, fails or dies is known by
its number before it can do harm to the data.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

_FRAME = struct.Struct("!BBQI")  # kind, series, number, length of what follows
_SEND_LIMIT = 10.0  # seconds; a message is small, so only a stopped rank makes one wait


class Kind(IntEnum):
    """What a message says."""

    ENTER = 1  # I call this operation, with this signature
    LEAVE = 2  # I am through with it
    WAITING = 3  # I am still in it, though it takes long
    FAIL = 4  # I failed, or give up
    KEEP = 5  # keep this value under this key
    BYE = 6  # I close my communicator


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


class ControlChannel:
    """The connections of one rank to all others, and what came over them.

    Read its state in the condition of `until`, which holds the lock.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        """Take over ``sockets``, one by each other rank."""
        self._sockets = sockets
        self._unread = {rank: bytearray() for rank in sockets}
        self._selector = selectors.DefaultSelector()
        for rank, connection in sockets.items():
            connection.settimeout(_SEND_LIMIT)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._alarm, selectors.EVENT_READ, None)
        self._changed = threading.Condition(threading.Lock())
        self._send_lock = threading.Lock()
        self._reading = False
        self.entered: dict[tuple[int, Series, int], bytes] = {}
        """The messages of operations not yet begun, by rank, series and number."""
        self.left: dict[tuple[int, Series], int] = {}
        """The number of the last operation that a rank is through with."""
        self.waiting: dict[tuple[int, Series], int] = {}
        """The number of the last operation that a rank said to be still in."""
        self.failures: dict[int, Failure] = {}
        self.values: dict[str, bytes] = {}
        """The values that ranks asked all others to keep."""
        self.closed: set[int] = set()
        self.died: set[int] = set()

    def send(
        self,
        ranks: Iterable[int],
        kind: Kind,
        series: Series = Series.SETUP,
        number: int = 0,
        content: bytes = b"",
    ) -> None:
        """Send a message to ``ranks``; those that are gone do not get it."""
        message = _FRAME.pack(kind, series, number, len(content)) + content
        with self._send_lock:
            for rank in ranks:
                try:
                    self._sockets[rank].sendall(message)
                except OSError:  # half a message would spoil the rest: reading finds the end
                    with contextlib.suppress(OSError):
                        self._sockets[rank].shutdown(socket.SHUT_RDWR)

    def send_failure(self, failure: Failure) -> None:
        """Tell all ranks, and wake the threads that wait in `until`."""
        content = json.dumps([failure.error, failure.ranks, failure.reason]).encode()
        self.send(self._sockets, Kind.FAIL, content=content)
        os.eventfd_write(self._alarm, 1)

    def send_value(self, key: str, value: bytes) -> None:
        """Have all ranks keep ``value``."""
        self.values[key] = value
        content = json.dumps([key, value.hex()]).encode()
        self.send(self._sockets, Kind.KEEP, content=content)

    def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Read messages until ``condition`` holds, and return True; False after ``deadline``.

        It first reads all that has come. What ``condition`` raises ends the wait too. Several
        threads may wait: one of them reads for all.
        """
        with self._changed:
            self._read_for(0.0)
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._read_for(left)
            return True

    def _read_for(self, seconds: float) -> None:
        if self._reading:
            self._changed.wait(seconds)
            return
        self._reading = True
        self._changed.release()
        try:
            ready = self._selector.select(seconds)
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        for key, _ in ready:
            self._read(key.data)

    def address_of(self, rank: int) -> str:
        """Return the address by which this rank reaches ``rank``."""
        return str(self._sockets[rank].getpeername()[0])

    def own_address(self) -> str:
        """Return the address by which ranks on other hosts, if there are any, reach this one."""
        found = sorted({str(s.getsockname()[0]) for s in self._sockets.values()})
        return next((a for a in found if not a.startswith("127.")), "127.0.0.1")

    def close(self) -> None:
        """Say goodbye to all ranks and close; no thread waits any more."""
        self.send(self._sockets, Kind.BYE)
        self._selector.close()
        os.close(self._alarm)
        for connection in self._sockets.values():
            # What is left unread would make the kernel reset the connection, and the bye be lost.
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                while connection.recv(65536):
                    pass
            connection.close()

    def _read(self, rank: int | None) -> None:
        if rank is None:
            os.eventfd_read(self._alarm)
            return
        try:
            data = self._sockets[rank].recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._sockets[rank])
            if rank not in self.closed:
                self.died.add(rank)
            return
        unread = self._unread[rank]
        unread += data
        while len(unread) >= _FRAME.size:
            kind, series, number, length = _FRAME.unpack_from(unread)
            end = _FRAME.size + length
            if len(unread) < end:
                break
            content = bytes(unread[_FRAME.size : end])
            del unread[:end]
            self._take(rank, Kind(kind), Series(series), number, content)

    def _take(self, rank: int, kind: Kind, series: Series, number: int, content: bytes) -> None:
        if kind is Kind.ENTER:
            self.entered[rank, series, number] = content
        elif kind is Kind.LEAVE:
            self.left[rank, series] = max(number, self.left.get((rank, series), -1))
        elif kind is Kind.WAITING:
            self.waiting[rank, series] = number
        elif kind is Kind.FAIL:
            error, ranks, reason = json.loads(content)
            self.failures.setdefault(rank, Failure(error, tuple(ranks), reason))
        elif kind is Kind.KEEP:
            key, value = json.loads(content)
            self.values[key] = bytes.fromhex(value)
        else:
            self.closed.add(rank)
