"""A timeline of all ranks, by TAGI_DDP_TRACE=folder: Chrome trace events, which Perfetto shows.

All ranks of a job write into one file, in turn by a lock on it: the file is complete between two
writes. Training never waits for that lock, which a stopped rank or another program may hold. A rank
that finds it locked twice in turn, or at its end for two seconds, writes into a file of its own.
Hosts need the folder in common, and clocks that agree.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from tagi_ddp.environment import detect, setting

P = ParamSpec("P")
T = TypeVar("T")

_PERIOD = 10.0  # The seconds between two writes.
_PATIENCE = 2.0  # The seconds that a rank waits for the lock at its end.
_END = b"\n]\n"
_TAIL = 1 << 16  # The bytes at a file's end that are searched for the end of an event.


class Timeline:
    """The events of this process that are not yet written into ``folder``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = os.getpid()
        self._epoch = time.time() - time.monotonic()
        self._events: list[tuple[str, threading.Thread, float, float]] = []
        self._failed = False  # After a write has failed there is no other.
        self._unwritten: list[bytes] = []  # Lines of a write that did not get the lock.
        self._alone = False  # True if this rank writes into a file of its own.
        self._named: set[int] = set()  # Threads whose names have been written.
        self._written = time.monotonic()
        self._lock = threading.RLock()  # A signal handler may run in the thread that has it.
        self._writer = 0  # The thread that is writing.
        self._ended_by = 0  # The signal that has arrived meanwhile.
        atexit.register(self.write, _PATIENCE)
        # Launchers end ranks by SIGTERM when another one has failed.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def add(self, name: str, begin: float, end: float) -> None:
        """Add what this thread did from ``begin`` to ``end``, by time.monotonic()."""
        if self._failed:
            return
        self._events.append((name, threading.current_thread(), begin, end))
        if end - self._written > _PERIOD:
            self.write()

    def write(self, patience: float = 0.0) -> None:
        """Write the new events into the job's file; warn once and give up if that fails.

        ``patience``: seconds to wait for the lock, at the end of this process.
        """
        if os.getpid() != self._process:
            return  # This is a fork, and the events are its parent's.
        with self._lock:
            self._writer = threading.get_ident()
            try:
                self._write(patience)
            except (OSError, ValueError) as error:
                self._failed = True
                warnings.warn(
                    f"TAGI_DDP_TRACE={self._folder}: no timeline is written: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            finally:
                self._writer = 0
        if self._ended_by:
            _end_by(self._ended_by)

    def _write(self, patience: float) -> None:
        events, self._events = self._events, []
        self._written = time.monotonic()
        if not events and not self._unwritten:
            return
        launch = detect()
        job = launch.job or f"{socket.gethostname()}-{self._process}"
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-zA-Z0-9.-]+", "-", job)
        kept, self._unwritten = self._unwritten, []
        lines = kept + self._lines(launch.rank, events)
        if not self._alone and append(self._folder / f"{name}.json", lines, patience):
            return
        self._alone = self._alone or bool(kept) or patience > 0
        if self._alone:
            append(self._folder / f"{name}-rank{launch.rank}-{self._process}.json", lines, None)
        else:
            self._unwritten = lines

    def _terminate(self, number: int, frame: object) -> None:
        if self._writer == threading.get_ident():  # The process ends after this write.
            self._ended_by = number
            return
        self.write(_PATIENCE)
        _end_by(number)

    def _lines(
        self, rank: int, events: list[tuple[str, threading.Thread, float, float]]
    ) -> list[bytes]:
        found: list[dict[str, object]] = []
        if not self._named:
            found.append(_name("process", rank, 0, f"rank {rank} on {socket.gethostname()}"))
        for name, thread, begin, end in events:
            number = thread.native_id or 0
            if number not in self._named:
                self._named.add(number)
                found.append(_name("thread", rank, number, thread.name))
            start, seconds = self._epoch + begin, end - begin
            found.append(
                {"name": name, "ph": "X", "pid": rank, "tid": number}
                | {"ts": round(1e6 * start, 3), "dur": round(1e6 * seconds, 3)}
            )
        return [json.dumps(event).encode() for event in found]


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, object]:
    event = {"name": f"{kind}_name", "ph": "M", "pid": rank, "tid": thread}
    return event | {"args": {"name": name}}


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def append(path: Path, events: list[bytes], patience: float | None = _PATIENCE) -> bool:
    """Append events to the array in a file, after its last event that is whole.

    Returns False, and leaves the file as it is, if another process holds its lock for ``patience``
    seconds; None: no lock is needed. A killed process can leave a part of an event.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        if patience is not None and not _lock(descriptor, patience):
            return False
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        last = tail.rfind(b"}\n") if tail.endswith(_END) else tail.rfind(b"},\n")
        begin = size - len(tail) + last + 1 if last >= 0 else 0
        content = (b",\n" if begin else b"[\n") + b",\n".join(events) + _END
        file.truncate(begin)
        file.seek(begin)
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
    return True


def _lock(descriptor: int, patience: float) -> bool:
    """Return whether this process gets the lock in time; any reader of the file can hold it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


timeline = Timeline(folder) if (folder := setting("TRACE")) else None
"""The timeline of this process; None without TAGI_DDP_TRACE."""


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Record calls of a function as ``name``; without TAGI_DDP_TRACE return it as it is."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        events = timeline
        if events is None:
            return function

        @functools.wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            begin = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                events.add(name, begin, time.monotonic())

        return measured

    return wrap
