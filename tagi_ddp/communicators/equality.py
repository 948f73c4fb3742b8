"""Parts of a program that all ranks complete, or none: checks, and values that must be equal."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tagi_ddp.communicators.communicator import Communicator, all_gather_object
from tagi_ddp.communicators.guard import AllRanksRaise

EARLIER = "(earlier)"
"""It stands for the version of a package that sends none."""

Entry = tuple[str, str]
Gather = Callable[[Any], list[Any]]
Same = Callable[[str, object], None]


class RanksDiffer(AllRanksRaise, ValueError):
    """Values that must be equal on all ranks differ, or another rank has raised an error."""


class OtherTypeError(RanksDiffer, TypeError):
    """Another rank has raised a TypeError."""


class OtherIndexError(RanksDiffer, IndexError):
    """Another rank has raised an IndexError."""


_OTHERS: dict[str, type[RanksDiffer]] = {
    "TypeError": OtherTypeError,
    "IndexError": OtherIndexError,
    "ValueError": RanksDiffer,
}


@contextmanager
def all_or_none(
    group: Communicator | Gather, what: str, remedy: str, error: type[Exception] | None = None
) -> Iterator[Same]:
    """Run the block on all ranks; raise on all if one raises, or if values differ.

    A collective call. The block gets a function, and calls it with the name of each value that must
    be equal and with this rank's value. If the block raises on a rank, that rank raises its own
    error, and the others raise one with its text. If all is well, this costs a gather of a few
    bytes.

    Args:
        group: a communicator, or a function that returns every rank's value, in rank order.
        what: the things that differ, in the plural; the beginning of the text of a difference.
        remedy: the end of that text.
        error: the type of the errors; None: RanksDiffer, also as a TypeError or an IndexError if
            the other rank has raised one.
    """
    own: list[Entry] = []
    problem: Exception | None = None
    try:
        yield lambda name, value: own.append((name, str(value)))
    except Exception as raised:
        problem = raised
    refusal = None if problem is None else _refusal(problem, error)
    if callable(group):
        answers = _answers(group, refusal, own)
    else:
        alone = group.size == 1
        answers = [] if alone else _answers(partial(all_gather_object, group), refusal, own)
    if problem is not None:
        raise problem
    for rank, (other, _) in enumerate(answers):
        if other is not None:
            kind, text = other
            raise (error or _OTHERS[kind])(f"rank {rank}: {text}")
    if answers:
        first, entries = answers[0][1], [entries for _, entries in answers]
        rank = next(rank for rank, other in enumerate(entries) if other != first)
        difference = first_difference(first, entries[rank], ("rank 0", f"rank {rank}"))
        raise (error or RanksDiffer)(f"{what} differ first at {difference}. {remedy}")


def require_equal(
    communicator: Communicator,
    describe: Callable[[], Iterable[Entry]],
    what: str,
    remedy: str,
    error: type[Exception] | None = None,
) -> None:
    """Raise on all ranks unless ``describe`` returns the same on all; see `all_or_none`."""
    with all_or_none(communicator, what, remedy, error) as same:
        for entry in describe():
            same(*entry)


def package_version() -> str:
    """Return the version of this package."""
    version: str = sys.modules["tagi_ddp"].__version__
    return version


def _refusal(problem: Exception, error: type[Exception] | None) -> tuple[str, str]:
    """Return the kind of an error, a key of `_OTHERS`, and its text for the other ranks."""
    kind = "ValueError"
    if isinstance(problem, (TypeError, IndexError)):
        kind = "TypeError" if isinstance(problem, TypeError) else "IndexError"
    plain = isinstance(problem, (TypeError, IndexError, ValueError, error or ValueError))
    return kind, str(problem) if plain else f"{type(problem).__name__}: {problem}"


def _answers(
    gather: Gather, refusal: tuple[str, str] | None, own: list[Entry]
) -> list[tuple[tuple[str, str] | None, list[Entry]]]:
    """Return all ranks' refusals and entries, in rank order; [] if they are the same."""
    digest = hashlib.sha256(repr((refusal, own)).encode()).hexdigest()
    return [] if len(set(gather(digest))) == 1 else gather((refusal, own))


def first_difference(
    expected: Sequence[Entry],
    found: Sequence[Entry],
    names: tuple[str, str] = ("another rank", "this rank"),
) -> str:
    """Return the first entry that differs, with the value of each of ``names``; "" if none does."""
    first, second = names
    for (name, value), (other, content) in zip(expected, found, strict=False):
        if (name, value) != (other, content):
            return f"{other} of {second}: {content}; {first} has {name}: {value}"
    if len(expected) == len(found):
        return ""
    has, lacks = (second, first) if len(found) > len(expected) else (first, second)
    name = max(expected, found, key=len)[min(len(expected), len(found))][0]
    return f"{name} of {has}, which {lacks} lacks"
