"""Restarts after failures, which end when the same failure comes again and again."""

from __future__ import annotations

import math
import re
import time

from tagi_ddp.elastic.messages import PREEMPTED
from tagi_ddp.launcher.failure import Failure

_MOST_ALIKE = 3  # failures alike in a row, after which another start would fail, too


def cause_of(error: str, step: int | None, began: bool) -> str:
    """Return the cause of a failure: without addresses and ranks, which differ between starts."""
    if began and step is None:
        return ""
    error = re.sub(r"\b0x[0-9a-fA-F]+|\branks? \d+((, | and )\d+)*", "...", error)
    return f"{error} ({'before the first step' if step is None else f'at step {step}'})"


class Restarts:
    """The restarts that are left, of a single rank or of all."""

    def __init__(self, left: int) -> None:
        self.again = False
        """True if a restart follows the last failure."""
        self.alike = 1
        """The number of the last failures in a row that are alike."""
        self._left = left
        self._cause = ""
        self._counted = -math.inf  # the time of the last failure

    def count(self, failure: Failure, started: float) -> None:
        """Count a failure of a rank, or of all ranks, that ``started`` at this time.

        Ranks that run at the same time may fail alike once; three starts that do so are enough.
        """
        if failure.exitcode != PREEMPTED:
            if not failure.cause or failure.cause != self._cause:
                self.alike = 1
            elif started > self._counted:
                self.alike += 1
            self._cause, self._counted = failure.cause, time.monotonic()
            if self.alike >= _MOST_ALIKE:
                self._left = 0
        self.again = self._left > 0
        self._left -= self.again and failure.exitcode != PREEMPTED

    @property
    def reason(self) -> str:
        """The reason for which restarts ended early; "" if they did not."""
        if self.alike < _MOST_ALIKE:
            return ""
        return f"the same failure came {self.alike} times in a row, {self._cause}: no more restarts"
