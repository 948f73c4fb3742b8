"""Ownership of a folder of checkpoints by one job at a time, through a lock on its file ``.lock``.

All ranks hold a shared lock; the rank that begins the job takes an exclusive one before. The system
drops the locks of a process when it ends, or closes any descriptor of the file. So a process has
one descriptor for each folder, even if it opens the folder several times.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK = ".lock"
_BUSY = (errno.EACCES, errno.EAGAIN)
_PAUSE = 0.05  # seconds between two attempts


class FolderInUse(ValueError):
    """Another job saves its checkpoints into the folder."""


@dataclass
class _Held:
    """A descriptor of a lock file, and the number of its users."""

    descriptor: int
    count: int = 0


_lock = threading.Lock()
_held: dict[str, _Held] = {}  # by folder
_jobs: dict[str, str] = {}  # by folder, the last job that this process has been a rank of


def _forget() -> None:
    """Drop the parent's state in a forked child, which has none of its locks."""
    global _lock
    _lock = threading.Lock()
    for held in _held.values():
        os.close(held.descriptor)
        held.descriptor = -1
    _held.clear()
    _jobs.clear()


os.register_at_fork(after_in_child=_forget)


class Owner:
    """A rank's share in the ownership of a folder, until `release`."""

    def __init__(self, folder: Path) -> None:
        self._key = os.path.realpath(folder)
        self._path = Path(self._key, LOCK)
        self._use: _Held | None = None

    def begin(self, patience: float) -> None:
        """Own the folder for a new job, or as a rank of the job that owns it.

        Raise FolderInUse if another job still owns it after ``patience`` seconds; OSError.
        """
        held = self._open()
        if not self._wait(held, fcntl.LOCK_EX, patience):
            return
        with _lock:
            _jobs[self._key] = job = secrets.token_hex(8)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        record = {"job": job, "process": os.getpid(), "host": socket.gethostname(), "since": now}
        os.ftruncate(held.descriptor, 0)
        os.pwrite(held.descriptor, json.dumps(record).encode(), 0)
        self._acquire(held, fcntl.LOCK_SH)

    def join(self, patience: float) -> None:
        """Become a rank of the job that owns the folder; raises as `begin`."""
        held = self._open()
        self._wait(held, fcntl.LOCK_SH, patience)
        with _lock:
            _jobs[self._key] = _record(held).get("job", "")

    def release(self) -> None:
        """Give up the ownership; may be called again."""
        with _lock:
            held, self._use = self._use, None
            if held is None:
                return
            held.count -= 1
            if not held.count and held.descriptor >= 0:
                os.close(held.descriptor)
                if _held.get(self._key) is held:
                    del _held[self._key]

    def _open(self) -> _Held:
        with _lock:
            held = _held.get(self._key)
            if held is None or not _is_at(held.descriptor, self._path):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                held = _held[self._key] = _Held(os.open(self._path, flags, 0o600))
            held.count += 1
            self._use = held
            return held

    def _wait(self, held: _Held, kind: int, patience: float) -> bool:
        """Wait for the lock; return False instead if this rank's job owns the folder already."""
        deadline = time.monotonic() + patience
        while not self._acquire(held, kind):
            if self._is_own(held):
                return False
            if time.monotonic() > deadline:
                error = FolderInUse(_in_use(held))
                self.release()
                raise error
            time.sleep(_PAUSE)
        return True

    def _acquire(self, held: _Held, kind: int) -> bool:
        """Return whether the lock was free; True as well if this file system has no locks."""
        try:
            fcntl.lockf(held.descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            warnings.warn(
                f"{self._path} cannot be locked ({error}), so another job that saves into this "
                "folder is not noticed: give each job a folder of its own",
                RuntimeWarning,
                stacklevel=2,
            )
        return True

    def _is_own(self, held: _Held) -> bool:
        """Return whether this rank's job owns the folder; if so, share its lock."""
        with _lock:
            own = _jobs.get(self._key)
        if own is None or _record(held).get("job") != own or not self._acquire(held, fcntl.LOCK_SH):
            return False
        return _record(held).get("job") == own


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a descriptor is that of the file at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _record(held: _Held) -> dict[str, Any]:
    """Return the record of the owner; {} if it is not written yet."""
    with suppress(ValueError):
        record = json.loads(os.pread(held.descriptor, 4096, 0))
        return record if isinstance(record, dict) else {}
    return {}


def _in_use(held: _Held) -> str:
    record = _record(held)
    return (
        f"it is used by another job, whose first rank is process {record.get('process', '?')} on "
        f"host {record.get('host', '?')} since {record.get('since', '?')}: end that job, or give "
        "another folder"
    )
