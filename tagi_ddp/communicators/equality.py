"""Whether all ranks say the same, before anything is done that needs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.communicators.objects import all_gather_object

Entry = tuple[str, str]


class RanksDiffer(AllRanksRaise, ValueError):
    """Ranks say different things of what must be the same; the text names the first of them."""


def require_equal(
    communicator: Communicator,
    describe: Callable[[], Iterable[Entry]],
    what: str,
    remedy: str,
    error: type[Exception] = RanksDiffer,
) -> None:
    """Raise on all ranks, naming the first difference, unless all say the same; a collective call.

    What all ranks agree on costs a gather of a few bytes.

    Args:
        communicator: of the ranks.
        describe: returns names, and what this rank says of each. It may refuse by an error of its
            own: this rank raises that, the others ``error``, which quotes it.
        what: what differs, in the plural: it begins the text.
        remedy: what to do about it: it ends the text.
        error: what is raised.
    """
    own: list[Entry] = []
    problem: Exception | None = None
    try:
        own = list(describe())
    except Exception as refusal:
        problem = refusal
    told = "" if problem is None else f"{type(problem).__name__}: {problem}"
    difference = _difference(communicator, told, own) if communicator.size > 1 else ""
    if problem is not None:
        raise problem
    if difference:
        raise error(f"{what} {difference}. {remedy}")


def _difference(communicator: Communicator, problem: str, own: list[Entry]) -> str:
    """Return which rank has a problem or else differs first from rank 0, and in what; else ""."""
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
    """Return the first entry that differs, with both values and whose they are; "" if none does."""
    first, second = names
    for (name, value), (other, said) in zip(expected, found, strict=False):
        if (name, value) != (other, said):
            return f"{other} of {second}: {said}; {first} has {name}: {value}"
    if len(expected) == len(found):
        return ""
    has, lacks = (second, first) if len(found) > len(expected) else (first, second)
    name = max(expected, found, key=len)[min(len(expected), len(found))][0]
    return f"{name} of {has}, which {lacks} lacks"
