"""Checks of arguments that several modules share."""

from __future__ import annotations

import operator
from typing import Any


def integer(name: str, value: Any, low: int | None = None) -> int:
    """Return ``value`` as an int of at least ``low``; numpy's integers pass, bools do not.

    Raises TypeError or ValueError that names the argument and what it got.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if low is not None and number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    return number
