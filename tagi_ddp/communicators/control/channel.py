"""The control channel: the connections of a rank for messages about calls, not for data.

By these messages each rank of an operation knows that the others call the same before data moves.
A rank that is late, differs, fails or dies is known by its number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import struct
import termios
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from tagi_ddp.communicators.control import mesh
from tagi_ddp.communicators.control.notes import Failure, Notes
from tagi_ddp.communicators.operations import Helper

_LENGTH = struct.Struct("!I")  # before each message of those that are sent together
_IDLE = 0.02  # seconds without an operation before the thread reads messages
_TURN = 1.0  # seconds for which it reads before it checks whether the channel is still used
# The errors that a broken or foreign message causes.
_NONSENSE = (ValueError, TypeError, KeyError, struct.error)


class ControlChannel:
    """The connections of one rank to its neighbours, and the state that their messages make.

    A thread forwards messages while no operation of this rank reads them. Read ``notes`` in the
    condition of `until`, which holds the lock; write to them in `sending`.
    """

    def __init__(self, connections: dict[int, Connection], rank: int, hosts: Sequence[str]) -> None:
        """Take over ``connections``, by neighbour; ``hosts`` are those of all ranks."""
        self.rank = rank
        self.hosts = list(hosts)
        self.address = mesh.own_address(connections.values())
        """The address at which ranks on other hosts reach this one, as its neighbours know it."""
        self.notes = Notes(rank, len(hosts))
        self._connections = connections
        self._selector = selectors.DefaultSelector()
        for neighbour, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, neighbour)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._alarm, selectors.EVENT_READ, None)
        # A signal handler may send a message while its thread reads or sends.
        self._changed = threading.Condition(threading.RLock())
        self._send_lock = threading.Lock()
        self._sends = 0  # the thread that sends
        self._reading = False
        self._used = False  # by an operation, since the helper looked
        self._helping = False
        self._closing = False
        # A selector refers to itself, and would keep a forgotten channel's connections.
        self._release = weakref.finalize(
            self, _release, self._selector, self._alarm, list(connections.values())
        )
        self._release.atexit = False
        try:
            self._helper = Helper(self.help, _IDLE)
        except BaseException:
            self._release()
            raise

    def sending(self, most_held: int = 0) -> _Sending:
        """Return a context whose block sends messages through the notes that it gets.

        Up to ``most_held`` messages may wait for later ones.
        """
        return _Sending(self._changed, self.notes, self._flush, most_held)

    def fail(self, failure: Failure) -> None:
        """Send a failure to all ranks, and wake the threads in `until`."""
        with self.sending() as notes:
            notes.fail(failure)
        os.eventfd_write(self._alarm, 1)

    def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Read messages until ``condition`` holds, and return True; False after ``deadline``.

        Messages that have arrived are read first. An error of ``condition`` ends the wait, too.
        Several threads may wait: one of them reads for all.
        """
        with self._changed:
            self._used = True
            while self._helping:
                os.eventfd_write(self._alarm, 1)  # This thread reads faster than the helper.
                self._changed.wait(_TURN)
            self._read_for(0.0)
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._read_for(left)
            return True

    def glance(self, condition: Callable[[], bool]) -> bool:
        """Read messages that have arrived, and return ``condition()``; send none."""
        with self._changed:
            if not self._reading:
                self._read(0.0)
            return condition()

    def help(self) -> None:
        """Forward messages of other ranks while this rank computes."""
        with self._changed:
            busy, self._used = self._used or self._reading, False
            if busy or self._closing:
                return
            self._helping = True
            try:
                self._read_for(_TURN)
            finally:
                self._helping = False
                self._changed.notify_all()

    def _read_for(self, seconds: float) -> None:
        if self._reading:
            self._changed.wait(seconds)
            return
        self._read(seconds)
        if self.notes.outbox:
            self._changed.release()
            try:
                self._flush()
            finally:
                self._changed.acquire()

    def _read(self, seconds: float) -> None:
        self._reading = True
        self._changed.release()
        received: list[tuple[int, bytes | None]] = []
        try:
            for key, _ in self._selector.select(seconds):
                received += self._receive(key.data)
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        for rank, message in received:
            if message is None:
                self.notes.lose(rank)
                continue
            try:
                self.notes.receive(rank, message)
            except _NONSENSE:
                mesh.cut(self._connections[rank])  # The next read finds the end.

    def _receive(self, rank: int | None) -> list[tuple[int, bytes | None]]:
        """Return the messages of ``rank``, None for its end; the alarm has rank None."""
        received: list[tuple[int, bytes | None]] = []
        if rank is None:
            os.eventfd_read(self._alarm)
            return received
        connection = self._connections[rank]
        try:
            while not received or _unread(connection):
                received += ((rank, each) for each in _messages(connection.recv_bytes()))
        except (OSError, EOFError):  # The end, or half a message for too long.
            self._selector.unregister(connection)
            received.append((rank, None))
        return received

    def _flush(self) -> None:
        """Send what ``outbox`` holds, but for ranks without a connection."""
        if self._sends == threading.get_ident():
            return  # It continues when the signal handler returns.
        with self._send_lock:
            self._sends = threading.get_ident()
            try:
                while self.notes.outbox:
                    self._send_all()
            finally:
                self._sends = 0

    def _send_all(self) -> None:
        together: defaultdict[int, list[bytes]] = defaultdict(list)
        while self.notes.outbox:
            rank, message = self.notes.outbox.popleft()
            together[rank] += (_LENGTH.pack(len(message)), message)
        for rank, parts in together.items():
            connection = self._connections.get(rank)
            if connection is None:
                continue
            try:
                connection.send_bytes(b"".join(parts))
            except OSError:  # Half a message would spoil those after it.
                mesh.cut(connection)

    @property
    def one_host(self) -> bool:
        """True if all ranks are on this host."""
        return len(set(self.hosts)) == 1

    def close(self) -> None:
        """Send all ranks the end, and close. No thread may wait here any more."""
        self._closing = True
        os.eventfd_write(self._alarm, 1)
        self._helper.close()
        with self.sending() as notes:
            notes.close()
        for connection in self._connections.values():
            # Unread bytes would make the kernel reset the connection, and lose the last message.
            with contextlib.suppress(OSError):
                os.set_blocking(connection.fileno(), False)
                while os.read(connection.fileno(), 65536):
                    pass
        self._release()


class _Sending:
    """A block that has exclusive access to the notes; ``flush`` sends its messages at the end."""

    def __init__(
        self,
        changed: threading.Condition,
        notes: Notes,
        flush: Callable[[], None],
        most_held: int,
    ) -> None:
        self._changed, self._notes, self._flush = changed, notes, flush
        self._most_held = most_held

    def __enter__(self) -> Notes:
        self._changed.acquire()
        return self._notes

    def __exit__(self, *_: object) -> None:
        self._changed.release()
        if len(self._notes.outbox) > self._most_held:
            self._flush()


def _release(
    selector: selectors.BaseSelector, alarm: int, connections: Sequence[Connection]
) -> None:
    selector.close()
    os.close(alarm)
    for connection in connections:
        connection.close()


def _messages(several: bytes) -> Iterator[bytes]:
    """Yield the messages that were sent together; of foreign bytes, nonsense."""
    begin = 0
    while begin < len(several):
        end = begin + _LENGTH.size + int.from_bytes(several[begin : begin + _LENGTH.size], "big")
        yield several[begin + _LENGTH.size : end]
        begin = end


def _unread(connection: Connection) -> bool:
    """Return whether a part of the next message has arrived."""
    count = bytearray(4)
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, count)
    return any(count)
