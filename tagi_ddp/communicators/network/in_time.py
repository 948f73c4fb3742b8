"""Time limits for calls of C and C++ that wait for other processes without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tagi_ddp.communicators.operation_queue import started

T = TypeVar("T")


class Late(Exception):
    """A call has not returned in time; its thread still waits."""


def in_time(call: Callable[[], T], limit: float) -> T:
    """Return the result of ``call``, or raise its error; raise `Late` after ``limit`` seconds.

    It runs in another thread, so signals are handled meanwhile.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    started(thread)
    thread.join(max(0.0, limit))
    if raised:
        raise raised[0]
    if not returned:
        raise Late
    return returned[0]
