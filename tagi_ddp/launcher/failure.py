"""Failures of ranks, the error that reports them, and the restarts after them."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

from tagi_ddp.elastic.messages import PREEMPTED

_MOST_ALIKE = 3  # failures alike in a row, after which another start would fail, too


class LaunchError(RuntimeError):
    """A rank failed; all others were ended.

    ``rank`` is the first rank that failed, ``exitcode`` its exit status or minus the number of the
    signal that killed it, and ``traceback`` its Python traceback, "" if there is none.
    """

    def __init__(self, message: str, rank: int, exitcode: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = traceback

    def __reduce__(self) -> tuple[type, tuple[str, int, int, str]]:
        """Pickle with all attributes."""
        return type(self), (str(self), self.rank, self.exitcode, self.traceback)


@dataclass
class Failure:
    """The failure of a rank; ``time`` is read from this host's monotonic clock.

    ``cause`` is equal for failures alike: the error and the step; "" if one of them is not known.
    """

    rank: int
    text: str
    exitcode: int
    time: float
    consequence: bool = False
    traceback: str = ""
    cause: str = ""

    def order(self) -> tuple[bool, bool, float]:
        """Return a sort key that puts the likeliest cause first.

        The launcher may notice a killed rank only after the errors that its death caused in others.
        """
        return self.consequence, self.exitcode >= 0, self.time


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
