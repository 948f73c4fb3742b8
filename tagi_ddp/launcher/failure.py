"""How a rank has failed, and the error that tells of it."""

from __future__ import annotations

from dataclasses import dataclass


class LaunchError(RuntimeError):
    """A rank failed; all others were ended.

    ``rank`` is the first that failed, ``exitcode`` its exit status, or minus the number of the
    signal that killed it, ``traceback`` its Python traceback, "" when there is none.
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
class Restarts:
    """How many times more a rank, or all of them, may be started again."""

    left: int


@dataclass
class Failure:
    """What is known of a rank that has failed; ``time`` is by this host's monotonic clock."""

    rank: int
    text: str
    exitcode: int
    time: float
    consequence: bool = False
    traceback: str = ""

    def order(self) -> tuple[bool, bool, float]:
        """Put the likeliest cause first.

        A killed rank is noticed after the fact, maybe after the errors that it caused in others.
        """
        return self.consequence, self.exitcode >= 0, self.time
