"""Operations in the order of their calls, on the caller's thread or on a thread of the lane."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Task:
    """One operation of a `Lane`; the `Work` that ``async_op=True`` returns.

    ``overdue(seconds)`` makes the error that `wait` raises when its own limit passes first.
    """

    def __init__(
        self,
        body: Callable[[], None],
        previous: Task | None,
        overdue: Callable[[float], BaseException],
    ) -> None:
        """Make a task that runs ``body`` once ``previous`` is complete."""
        self._body: Callable[[], None] | None = body
        self._previous = previous
        self._overdue = overdue
        self._error: BaseException | None = None
        self._complete = threading.Event()

    def run(self) -> None:
        """Run after the previous task; keep the error for `wait`."""
        try:
            if self._previous is not None:
                self._previous._complete.wait()
                self._previous = None
            assert self._body is not None
            self._body()
        except BaseException as error:
            self._error = error
        finally:
            self._body = None  # it holds the caller's buffers
            self._complete.set()

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
        self, body: Callable[[], None], overdue: Callable[[float], BaseException], *, async_op: bool
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
