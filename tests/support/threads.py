"""Calls that several threads make at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 4


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that several threads begin at once, and take turns often."""
    gate = threading.Barrier(THREADS, timeout=60)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS, initializer=gate.wait) as pool:
            return [future.result(120) for future in [pool.submit(call) for call in calls]]
    finally:
        sys.setswitchinterval(interval)
