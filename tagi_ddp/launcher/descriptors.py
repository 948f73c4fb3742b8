"""Descriptors 0 to 2 of a process that was started with some of them closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def standard_descriptors() -> Iterator[None]:
    """Open /dev/null at each of the descriptors 0 to 2 that is closed, during the block.

    Otherwise a pipe could get such a number, at which a rank has its own standard stream.
    """
    opened = []
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # It is the lowest free number.
        opened.append(descriptor)
    os.close(descriptor)
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
