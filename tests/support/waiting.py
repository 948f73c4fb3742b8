"""Make it an error that the host waits for its GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waiting(device: str = "cuda") -> Iterator[None]:
    """Raise in whatever waits for a GPU; on the CPU nothing does."""
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
