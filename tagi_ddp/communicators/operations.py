"""Operations: their calls, their order, and the threads on which they run.

These threads are daemons: a ThreadPoolExecutor would join its own when the interpreter ends, before
anything could abort an operation that is stuck.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, NoReturn, TypeVar

from tagi_ddp.communicators.errors import BackendUnavailable

T = TypeVar("T")


Ready = Callable[[float], bool]
"""Waits up to some seconds for an operation; returns whether it is complete; raises its error."""


@dataclass
class Call:
    """One operation of one rank.

    The calls of two ranks fit if ``name`` and ``arguments`` are equal. ``peer`` is the other rank
    of a message. ``previous`` is the title of the collective before this one. ``deadline`` is a
    time of the monotonic clock: ``limit`` seconds after the operation begins. ``waits_for`` returns
    the ranks for which it waits now.
    """

    name: str
    arguments: str
    limit: float
    peer: int | None = None
    number: int = 0
    previous: str = ""
    deadline: float = 0.0
    waits_for: Callable[[], list[int]] = list

    @property
    def title(self) -> str:
        """For example "all_reduce #17" or "send #3 to rank 1"."""
        if self.number == 0 or self.name == "init":
            return self.name
        if self.peer is None:
            return f"{self.name} #{self.number}"
        direction = "to" if self.name == "send" else "from"
        return f"{self.name} #{self.number} {direction} rank {self.peer}"

    def __str__(self) -> str:
        """Return for example "all_reduce(float32[8], op=sum)"."""
        return f"{self.name}({self.arguments})"

    def left(self) -> float:
        """Return the seconds before the deadline, at least 0.01."""
        return max(0.01, self.deadline - time.monotonic())


def _raise(error: BaseException) -> NoReturn:
    raise error


class Ticket(Generic[T]):
    """An operation in an `OperationQueue`; the `Work` that ``async_op=True`` returns.

    One of Python's futures would take several times as long to make and complete.
    """

    def __init__(
        self, previous: Ticket[Any] | None, overdue: Callable[[float], BaseException] | None = None
    ) -> None:
        """Follow ``previous``; ``overdue(seconds)`` makes the error of a limited `wait`."""
        self._previous = previous
        self._overdue = overdue
        self._incomplete = threading.Lock()
        self._incomplete.acquire()
        self._done = False
        self._error: BaseException | None = None
        self._result: T

    def await_previous(self) -> None:
        """Return when the previous operation is complete, or has failed."""
        if self._previous is not None:
            self._previous.ended()
            self._previous = None

    def run(self, operation: Callable[[], T]) -> None:
        """Run ``operation``; keep its result, or its error."""
        try:
            self._result = operation()
        except BaseException as error:
            self._error = error
        finally:
            self._done = True
            self._previous = self._overdue = None  # Else each would keep all before it.
            self._incomplete.release()

    def ended(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most ``timeout`` seconds; return whether it has ended."""
        limit = -1 if timeout is None else max(0.0, timeout)
        if not self._done and self._incomplete.acquire(timeout=limit):
            self._incomplete.release()  # Other threads may wait, too.
        return self._done

    def wait(self, timeout: float | None = None) -> None:
        """Block until complete; raise its error if it failed.

        ``timeout`` in seconds limits this wait only: the operation continues after the `Timeout`.
        """
        overdue = self._overdue  # None once complete
        if not self.ended(timeout) and overdue is not None:
            raise overdue(timeout or 0.0)
        if self._error is not None:
            raise self._error

    def ready(self, seconds: float) -> bool:
        """Wait for some seconds; return whether it is complete; raise its error if it failed."""
        if not self.ended(seconds):
            return False
        self.wait()
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait as `wait` does, and return the result of the operation."""
        self.wait(timeout)
        return self._result

    def done(self) -> bool:
        """Return, without blocking, whether it is complete or has failed."""
        return self._done


def start_thread(target: Callable[..., object], *args: object, name: str | None = None) -> Thread:
    """Start a daemon; raise BackendUnavailable if the system has no thread left for this user."""
    thread = Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise BackendUnavailable(f"{error}: raise `ulimit -u`, or the container's limit") from error
    return thread


def in_time(call: Callable[[], T], limit: float, late: BaseException) -> T:
    """Return the result of ``call``, or raise its error; raise ``late`` after ``limit`` seconds.

    It runs in another thread, so signals are handled meanwhile. It is for calls of C and C++ that
    wait for other processes without a limit; if it is late, its thread still waits.
    """
    ticket: Ticket[T] = Ticket(None, lambda seconds: late)
    start_thread(ticket.run, call)
    return ticket.result(limit)


class Helper:
    """A thread that calls a method every few moments until `close`, or its object is garbage."""

    def __init__(self, method: Callable[[], object], pause: float) -> None:
        """Start the thread, which pauses for ``pause`` seconds before each call."""
        self._method = weakref.WeakMethod(method)
        self._closing = threading.Event()
        self._thread = start_thread(self._run, pause)

    def _run(self, pause: float) -> None:
        while not self._closing.wait(pause) and self._call():
            pass

    def _call(self) -> bool:
        method = self._method()
        if method is not None:
            method()
        return method is not None

    def close(self, limit: float | None = None) -> None:
        """End the thread after the present call; wait for ``limit`` seconds at most."""
        self._closing.set()
        self._thread.join(limit)


class Inside:
    """The threads in a block; a signal handler on one of them must not wait for the block."""

    def __init__(self) -> None:
        """Begin with none."""
        self._threads: set[int] = set()

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.discard(threading.get_ident())

    def __bool__(self) -> bool:
        return bool(self._threads)

    @property
    def here(self) -> bool:
        """True if this thread is in the block."""
        return threading.get_ident() in self._threads


class OperationQueue:
    """The order of operations, and a thread for asynchronous ones."""

    def __init__(self, name: str) -> None:
        """Make an empty queue; its thread starts with the first asynchronous operation."""
        self._name = name
        self._last: Ticket[Any] | None = None
        self._asynchronous: SimpleQueue[tuple[Ticket[Any], Callable[[], Any]] | None]
        self._asynchronous = SimpleQueue()
        self._thread: Thread | None = None

    def ticket(self, overdue: Callable[[float], BaseException] | None = None) -> Ticket[Any]:
        """Return the next ticket; the caller holds a lock, and must then run the ticket."""
        previous = None if self._last is None or self._last.done() else self._last
        ticket: Ticket[Any] = Ticket(previous, overdue)
        self._last = ticket
        return ticket

    def start(self, ticket: Ticket[T], operation: Callable[[], T]) -> None:
        """Run an operation on the queue's thread; the caller still holds the lock of `ticket`."""
        if self._thread is None:
            try:
                self._thread = start_thread(self._serve, name=self._name)
            except BackendUnavailable as error:
                ticket.run(partial(_raise, error))  # Those after it must not wait.
                raise
        self._asynchronous.put((ticket, operation))

    def begin(self, operation: Callable[[], object]) -> Ready:
        """Run an operation on the queue's thread; return a function that waits for it."""
        ticket = self.ticket()
        self.start(ticket, operation)
        return ticket.ready

    def _serve(self) -> None:
        for ticket, operation in iter(self._asynchronous.get, None):
            ticket.run(operation)
            del ticket, operation  # They hold the caller's buffers.

    def close(self, limit: float | None = None) -> None:
        """Wait for all tickets, each of which ends within its own limit, and end the thread.

        An operation that is stuck for ``limit`` seconds is abandoned.
        """
        if self._last is not None:
            self._last.ended(limit)
        if self._thread is not None:
            self._asynchronous.put(None)
            self._thread.join(limit)
