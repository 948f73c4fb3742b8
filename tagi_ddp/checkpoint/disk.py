"""Calls that wait for storage, with a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """A call in a thread of its own, which does not keep the process from ending.

    Args:
        call: the function, which takes no arguments.
        limit: the seconds for which `result` waits, in all its calls together.
        failure: the beginning of the error's text at the limit, like "x has not been written".
    """

    def __init__(self, call: Callable[[], T], limit: float, failure: str) -> None:
        self._call, self._limit, self._failure = call, limit, failure
        self._done = threading.Event()
        self._late = False
        self._result: T
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        """True if the call has returned or raised an error."""
        return self._done.is_set()

    def result(self) -> T:
        """Return the result of the call or raise its error; raise TimeoutError at the limit."""
        if not self._done.wait(0 if self._late else self._limit):
            self._late = True
            raise TimeoutError(
                f"{self._failure} within {self._limit:.3g} s: the storage of the folder does not "
                "answer"
            )
        if self._error is not None:
            raise self._error
        return self._result


def on_disk(call: Callable[[], T], limit: float, failure: str) -> T:
    """Return the result of a call that waits for storage; raise its error; see `Call`."""
    return Call(call, limit, failure).result()
