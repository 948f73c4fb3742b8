"""The call of an operation by one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Call:
    """One operation of one rank.

    The calls of two ranks fit if ``name`` and ``arguments`` are equal. ``deadline`` is a time of
    the monotonic clock: ``limit`` seconds after the operation begins. ``waits_for`` returns the
    ranks for which it waits now.
    """

    name: str
    arguments: str
    limit: float
    peer: str = ""  # "to rank 1" for a message
    number: int = 0
    deadline: float = 0.0
    waits_for: Callable[[], list[int]] = list

    @property
    def title(self) -> str:
        """For example "all_reduce #17" or "send #3 to rank 1"."""
        if self.number == 0 or self.name == "init":
            return self.name
        return f"{self.name} #{self.number} {self.peer}".rstrip()

    def left(self) -> float:
        """Return the seconds before the deadline, at least 0.01."""
        return max(0.01, self.deadline - time.monotonic())
