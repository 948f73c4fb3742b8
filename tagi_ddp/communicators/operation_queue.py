"""Operations in the order of their calls, on the caller's thread or on a thread of the lane."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Body = Callable[[Callable[[], None]], None]


class Task:
    """One operation of a `Lane`; the `Work` that ``async_op=True`` returns.

    ``body(await_turn)`` calls ``await_turn`` first, which returns once the previous task is
    complete. ``overdue(seconds)`` makes the error of a `wait` whose own limit passes first.
    """

    def __init__(
        self,
        body: Body,
        previous: Task | None,
        overdue: Callable[[float], BaseException],
    ) -> None:
        """Make a task that comes after ``previous``."""
        self._body: Body | None = body
        self._previous = previous
        self._overdue = overdue
        self._error: BaseException | None = None
        self._complete = threading.Event()

    def run(self) -> None:
        """Run, and keep the error for `wait`."""
        try:
            assert self._body is not None
            self._body(self._await_turn)
        except BaseException as error:
            self._error = error
        finally:
            self._body = None  # it holds the caller's buffers
            self._complete.set()

    def _await_turn(self) -> None:
        if self._previous is not None:
            self._previous._complete.wait()
            self._previous = None

    def wait(self, timeout: float | None = None) -> None:
        """Block until complete; raise its error if it failed.

        ``timeout`` in seconds limits this wait only: the operation goes on after the `Timeout`.
        """
        if not self._complete.wait(timeout):
            raise self._overdue(timeout or 0.0)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Tell, without blocking, whether it is complete or has failed."""
        return self._complete.is_set()


class Lane:
    """Runs tasks one after the other, in the order of `submit`."""

    def __init__(self, name: str) -> None:
        """Make an empty lane; its thread starts with the first asynchronous task."""
        self._name = name
        self._last: Task | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self, body: Body, overdue: Callable[[float], BaseException], *, async_op: bool
    ) -> Task:
        """Take the next place; callers hold a lock.

        An asynchronous task runs on the lane's thread, a blocking one when its caller calls `run`.
        """
        previous = None if self._last is None or self._last.done() else self._last
        self._last = task = Task(body, previous, overdue)
        if async_op:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put(task)
        return task

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()

    def close(self) -> None:
        """Wait for what was submitted, each ending within its own limit, and end the thread."""
        if self._last is not None:
            self._last._complete.wait()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
