"""What the ranks of a group tell each other beside the data: where they are, and how they end.

Every operation begins with a message to the ranks that take part, and its data moves only when
their messages have come and fit. So a rank that does not come, differs, fails or dies is known by
its number before it can do harm to the data.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection

from tagi_ddp.communicators.control import mesh

_HEADER = struct.Struct("!BBQ")  # kind, series, number; the content follows


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

    def __init__(self, connections: dict[int, Connection], rank: int, hosts: Sequence[str]) -> None:
        """Take over ``connections``, one by each other rank; ``hosts`` tells where each rank is."""
        self._connections = connections
        self.rank = rank
        self.hosts = list(hosts)
        self._selector = selectors.DefaultSelector()
        for rank, connection in connections.items():
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
        message = _HEADER.pack(kind, series, number) + content
        with self._send_lock:
            for rank in ranks:
                try:
                    self._connections[rank].send_bytes(message)
                except OSError:  # half a message would spoil the rest
                    mesh.cut(self._connections[rank])

    def send_failure(self, failure: Failure) -> None:
        """Tell all ranks, and wake the threads that wait in `until`."""
        content = json.dumps([failure.error, failure.ranks, failure.reason]).encode()
        self.send(self._connections, Kind.FAIL, content=content)
        os.eventfd_write(self._alarm, 1)

    def send_value(self, key: str, value: bytes) -> None:
        """Have all ranks keep ``value``."""
        self.values[key] = value
        content = json.dumps([key, value.hex()]).encode()
        self.send(self._connections, Kind.KEEP, content=content)

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
        came: list[tuple[int, bytes | None]] = []
        try:
            for key, _ in self._selector.select(seconds):
                came += self._receive(key.data)
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        for rank, message in came:
            self._take(rank, message)

    def _receive(self, rank: int | None) -> list[tuple[int, bytes | None]]:
        """Return what has come from ``rank``, None for the end; None is the alarm's rank."""
        came: list[tuple[int, bytes | None]] = []
        if rank is None:
            os.eventfd_read(self._alarm)
            return came
        connection = self._connections[rank]
        try:
            while not came or _unread(connection):
                came.append((rank, connection.recv_bytes()))
        except (OSError, EOFError):  # or the rest of a message does not come
            self._selector.unregister(connection)
            came.append((rank, None))
        return came

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return len(set(self.hosts)) == 1

    def own_address(self) -> str:
        """Return the address by which ranks on other hosts, if there are any, reach this one."""
        return mesh.own_address(self._connections.values())

    def close(self) -> None:
        """Say goodbye to all ranks and close; no thread waits any more."""
        self.send(self._connections, Kind.BYE)
        self._selector.close()
        os.close(self._alarm)
        for connection in self._connections.values():
            # What is left unread would make the kernel reset the connection, and the bye be lost.
            with contextlib.suppress(OSError):
                os.set_blocking(connection.fileno(), False)
                while os.read(connection.fileno(), 65536):
                    pass
            connection.close()

    def _take(self, rank: int, message: bytes | None) -> None:
        if message is None:
            if rank not in self.closed:
                self.died.add(rank)
            return
        code, count, number = _HEADER.unpack_from(message)
        kind, series, content = Kind(code), Series(count), message[_HEADER.size :]
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


def _unread(connection: Connection) -> bool:
    """Tell whether a part of the next message has come."""
    count = bytearray(4)
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, count)
    return any(count)
