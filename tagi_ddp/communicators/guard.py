"""How an error of one rank ends the others' waiting, and what a ``with`` block does at its end."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, TypeVar

from tagi_ddp.communicators.errors import CommunicatorError

C = TypeVar("C", bound="Closing")


def last_words() -> str | None:
    """Return the error that ends this process, which nobody has caught; None: it ends well."""
    error = getattr(sys, "last_value", None)
    return None if error is None else f"{type(error).__name__}: {error}"


class AllRanksRaise(Exception):
    """An error that all ranks raise at the same place, so that none need tell the others."""


class CanAbort(Protocol):
    """A communicator, or several at once."""

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """Let every rank that waits, or comes later, get `PeerLost` with ``reason``.

        It blames ``ranks``; none: this one.
        """
        ...


class Closing(ABC):
    """Something that leaves its group at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and free what was made; may be called again."""

    @abstractmethod
    def _give_up(self, error: BaseException) -> None:
        """Let the other ranks know of the error that has ended the block."""

    def __enter__(self: C) -> C:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; when the block ended in an error the other ranks learn it before."""
        if error is not None:
            self._give_up(error)
        self.close()


def abort(groups: Iterable[CanAbort], error: BaseException, ranks: Sequence[int] = ()) -> None:
    """Tell the ranks of ``groups`` of an error of this one, unless they have it too.

    It blames ``ranks``, as the first of ``groups`` numbers them; none: this one.
    """
    if isinstance(error, AllRanksRaise):
        return
    for group in groups:
        with suppress(CommunicatorError):  # it may be closed
            group.abort(f"{type(error).__name__}: {error}", ranks)


def report(groups: Iterable[CanAbort], error: BaseException) -> None:
    """Let the other ranks know of this one's error, so that none waits for it.

    Errors of communicators name ranks as the first of ``groups`` numbers them.
    """
    abort(groups, error, error.ranks if isinstance(error, CommunicatorError) else ())


@contextmanager
def or_abort(groups: Iterable[CanAbort]) -> Iterator[None]:
    """Let the other ranks know when this one fails in the block; see `report`."""
    try:
        yield
    except BaseException as error:
        report(groups, error)
        raise
