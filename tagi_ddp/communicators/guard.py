"""Errors of one rank that end the waits of others, and the end of ``with`` blocks."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, TypeVar

from tagi_ddp.communicators.errors import CommunicatorError

C = TypeVar("C", bound="Closing")


def uncaught_error() -> str | None:
    """Return the text of the uncaught error that ends this process; None if there is none."""
    error = getattr(sys, "last_value", None)
    return None if error is None else f"{type(error).__name__}: {error}"


class AllRanksRaise(Exception):
    """An error that all ranks raise at the same point: no rank need report it to others."""


class CanAbort(Protocol):
    """A communicator, or several at once."""

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """Make every rank that waits, or calls later, raise `PeerLost` with ``reason``.

        The error blames ``ranks``; none: this one.
        """
        ...


class Closing(ABC):
    """An object that leaves its group at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and free everything; may be called again."""

    @abstractmethod
    def _give_up(self, error: BaseException) -> None:
        """Report the error that has ended the block to the other ranks."""

    def __enter__(self: C) -> C:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; if the block ended in an error, report it to the other ranks before."""
        if error is not None:
            self._give_up(error)
        self.close()


def abort(groups: Iterable[CanAbort], error: BaseException, ranks: Sequence[int] = ()) -> None:
    """Abort ``groups`` after an error of this rank, unless all ranks raise it.

    The errors blame ``ranks``, numbered as in the first of ``groups``; none: this one.
    """
    if isinstance(error, AllRanksRaise):
        return
    for group in groups:
        with suppress(CommunicatorError):  # The group may be closed.
            group.abort(f"{type(error).__name__}: {error}", ranks)


def report(groups: Iterable[CanAbort], error: BaseException) -> None:
    """Report an error of this rank to the others, so that none waits for it.

    The ranks of a CommunicatorError are numbered as in the first of ``groups``.
    """
    abort(groups, error, error.ranks if isinstance(error, CommunicatorError) else ())


@contextmanager
def or_abort(groups: Iterable[CanAbort]) -> Iterator[None]:
    """Report an error in the block to the other ranks; see `report`."""
    try:
        yield
    except BaseException as error:
        report(groups, error)
        raise
