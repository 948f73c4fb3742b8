"""Checks for processes that a job has started."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_running(pid: int | str) -> bool:
    """Return whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: Iterable[int | str]) -> bool:
    """Return whether processes are gone soon: the kernel takes a moment for killed ones."""
    pids = list(pids)
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, pids))
