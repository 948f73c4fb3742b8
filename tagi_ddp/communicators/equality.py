"""Checks that values are equal on all ranks, before an operation that needs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from tagi_ddp.communicators.communicator import Communicator, all_gather_object
from tagi_ddp.communicators.guard import AllRanksRaise

Entry = tuple[str, str]


class RanksDiffer(AllRanksRaise, ValueError):
    """Values that must be equal on all ranks differ; the text names the first of them."""


def require_equal(
    communicator: Communicator,
    describe: Callable[[], Iterable[Entry]],
    what: str,
    remedy: str,
    error: type[Exception] = RanksDiffer,
) -> None:
    """Raise on all ranks, naming the first difference, unless all are equal; a collective call.

    If they are, this costs a gather of a few bytes.

    Args:
        communicator: of the ranks.
        describe: returns names, each with this rank's value. It may raise an error: then this rank
            raises that, and the others ``error``, which quotes it.
        what: the beginning of the text: the things that differ, in the plural.
        remedy: the end of the text: what to do.
        error: the type of the error.
    """
    own: list[Entry] = []
    problem: Exception | None = None
    try:
        own = list(describe())
    except Exception as refusal:
        problem = refusal
    refused = "" if problem is None else f"{type(problem).__name__}: {problem}"
    difference = _difference(communicator, refused, own) if communicator.size > 1 else ""
    if problem is not None:
        raise problem
    if difference:
        raise error(f"{what} {difference}. {remedy}")


def _difference(communicator: Communicator, problem: str, own: list[Entry]) -> str:
    """Return the first problem of a rank, else the first difference from rank 0, else ""."""
    digest = hashlib.sha256(repr((problem, own)).encode()).hexdigest()
    if len(set(all_gather_object(communicator, digest))) == 1:
        return ""
    everyone: list[tuple[str, list[Entry]]] = all_gather_object(communicator, [problem, own])
    for rank, (refusal, _) in enumerate(everyone):
        if refusal:
            return f"are refused by rank {rank}: {refusal}"
    first = everyone[0][1]
    rank = next(rank for rank, (_, entries) in enumerate(everyone) if entries != first)
    names = ("rank 0", f"rank {rank}")
    return f"differ first at {first_difference(first, everyone[rank][1], names)}"


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
