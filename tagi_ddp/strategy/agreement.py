"""Comparison of the ranks' arguments, before any group is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tagi_ddp.checks import integer
from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.strategy.seeds import base_seed


class GroupsDiffer(AllRanksRaise, ValueError):
    """Numbers or seeds that differ between ranks."""


def described(seed: int | None, **numbers: Any) -> tuple[int | Exception, dict[str, Any]]:
    """Return the base seed, or the error about it, and the values that ranks compare."""
    base: int | Exception
    try:
        base = base_seed(seed)
    except (TypeError, ValueError) as error:
        base = error
    return base, {name: _plain(value) for name, value in {**numbers, "seed": base}.items()}


def check_same(answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise GroupsDiffer that names the first value in which the ranks' ``answers`` differ.

    All ranks call this with the same answers, in rank order.
    """
    for name in dict.fromkeys(name for answer in answers for name in answer):
        values = [answer.get(name, "nothing") for answer in answers]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise GroupsDiffer(
                f"{name} must be the same on all ranks, but rank 0 has {values[0]} and rank {other}"
                f" {values[other]}"
            )


def _plain(value: Any) -> int | str:
    """Return an integer as an int, and anything else as a text to send and compare."""
    try:
        return integer("", value)
    except TypeError:
        return repr(value)
