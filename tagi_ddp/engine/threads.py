"""Locks for calls from several threads, and what a fork of the process may go on with."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_torch_was_forked = False  # whether this process is a fork of one that had imported torch


class Locked(Protocol):
    """An object whose methods run one at a time."""

    @property
    def _calls(self) -> AbstractContextManager[Any]: ...


S = TypeVar("S", bound=Locked)
P = ParamSpec("P")
T = TypeVar("T")


def new_lock() -> AbstractContextManager[Any]:
    """Return a reentrant lock of threads.

    A fork has only the thread that forked: there the locks that other threads held are free.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make calls of ``method`` on one object wait for those of other threads."""

    @functools.wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calls:
            return method(self, *args, **kwargs)

    return alone


#: Held from a seed of the engine's generator, of which a process has one, to its last draw.
engine_generator = new_lock()


def torch_threads(count: int) -> int:
    """Return how many threads torch may use of ``count``: one in a fork of a process with torch.

    A fork does not have the threads of torch's pool, but torch would wait for them for ever.
    """
    return 1 if _torch_was_forked else count


def _go_on_in_fork() -> None:
    global _torch_was_forked
    for lock in list(_locks):
        if not lock._is_owned():  # by the thread that forked, which releases it itself
            lock._at_fork_reinit()
    set_torch_threads = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_torch_threads is not None:
        _torch_was_forked = True
        set_torch_threads(1)


os.register_at_fork(after_in_child=_go_on_in_fork)
