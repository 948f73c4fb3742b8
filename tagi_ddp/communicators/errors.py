"""The errors of every communicator: each names the operation, this rank and the ranks at fault."""

from __future__ import annotations

from collections.abc import Sequence


class CommunicatorError(RuntimeError):
    """A collective could not be carried out.

    ``ranks`` holds the ranks at fault (missing, lost or different), empty when no rank is to blame.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class Timeout(CommunicatorError, TimeoutError):
    """Ranks in ``ranks`` are alive, or not known to be dead, but did not come in time."""


class PeerLost(CommunicatorError, ConnectionError):
    """Ranks in ``ranks`` died, closed their communicator, or gave up with an error."""


class Mismatch(CommunicatorError, ValueError):
    """Ranks called different operations, or the same one with arguments that do not fit."""


class BackendUnavailable(CommunicatorError):
    """The backend cannot work here; the text says what is missing and what to do."""
