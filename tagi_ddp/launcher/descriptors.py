"""Descriptors 0 to 2 of a process that was started with some of them closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def standard_descriptors() -> Iterator[None]:
    """Keep /dev/null open at those of the numbers 0 to 2 that are closed.

    A pipe that got such a number could not be passed to a rank, which has its own streams there.
    """
    opened = []
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # always the lowest free number
        opened.append(descriptor)
    os.close(descriptor)
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
