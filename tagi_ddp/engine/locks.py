"""Locks for calls from several threads: in a fork, and at the end of the process."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_PATIENCE = 10.0  # seconds at the end of the process
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_of_steps: weakref.WeakSet[Any] = weakref.WeakSet()  # those to be kept at the end
_torch_was_forked = False  # True if this process is a fork of one that had imported torch


class Locked(Protocol):
    """An object whose methods run one at a time."""

    @property
    def _calls(self) -> AbstractContextManager[Any]: ...


S = TypeVar("S", bound=Locked)
P = ParamSpec("P")
T = TypeVar("T")


def new_lock(of_steps: bool = False) -> AbstractContextManager[Any]:
    """Return a reentrant lock for threads; ``of_steps`` if it is held for a step at a time.

    A fork has only the thread that forked, so locks that other threads hold are free in it.
    """
    lock = threading.RLock()
    _locks.add(lock)
    if of_steps:
        _of_steps.add(lock)
    return lock


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make calls of ``method`` on one object wait for calls from other threads."""

    @functools.wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calls:
            return method(self, *args, **kwargs)

    return alone


#: The lock of the process's engine generator, to be held from a seed to the last draw.
engine_generator = new_lock()


def torch_threads(count: int) -> int:
    """Return ``count``, or 1 in a fork of a process with torch, where torch may use one thread.

    A fork does not have the threads of torch's pool, but torch would wait for them forever.
    """
    return 1 if _torch_was_forked else count


def _repair_fork() -> None:
    global _torch_was_forked
    for lock in list(_locks):
        if not lock._is_owned():  # The thread that forked releases its own locks.
            lock._at_fork_reinit()
    set_torch_threads = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_torch_threads is not None:
        _torch_was_forked = True
        set_torch_threads(1)


os.register_at_fork(after_in_child=_repair_fork)


@atexit.register
def _keep_locks() -> None:
    """Wait for steps of daemon threads, and keep their locks, so that they begin no other step.

    Python ends such a thread once it wants the interpreter's lock. A thread that is in code of C++
    then, as of the engine or torch, ends the process with it, by SIGABRT.
    """
    end = time.monotonic() + _PATIENCE
    for lock in list(_of_steps):
        lock.acquire(timeout=max(0.0, end - time.monotonic()))
