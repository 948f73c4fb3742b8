"""Failures of ranks, and the error that reports them."""

from __future__ import annotations

from dataclasses import dataclass


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
