"""A warning if a network learns its classes one after the other."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

_ROWS = 64  # with one label, in steps one after the other, that shuffled rows never have
_FIRST, _EVERY = 4096, 16  # steps that are all looked at, and then one of so many


class SortedLabels:
    """A look at the labels of the steps, for rows that are sorted by label.

    It warns once, when two labels have each had many rows in a row. A rare class has no such rows
    if they are shuffled, and a network with one class alone is no fault.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._skipped = 0
        self._label = b""  # that of all rows of the last step, "" if they had several
        self._rows = 0  # how many rows had it, in the last steps
        self._sorted: set[bytes] = set()  # labels that had many

    def look(self, samples: int, mu_obs: Any, selected: Any) -> bool:
        """Look at the observations of a step, of ``samples`` rows; return False after the warning.

        Observations on a device, or of no network for classes, are not looked at.
        """
        if self._looks >= _FIRST and self._skipped < _EVERY - 1:
            self._skipped += 1
            return True
        self._looks += 1
        self._skipped = 0
        label = _label_of(samples, mu_obs, selected)
        if not label:
            self._label = b""
            return True
        self._rows = self._rows + samples if label == self._label else samples
        self._label = label
        if self._rows >= _ROWS:
            self._sorted.add(label)
        if len(self._sorted) < 2:
            return True
        warnings.warn(
            f"the labels of many steps in a row are alike: {_ROWS} rows or more of one class, and "
            "then of another. A network that learns one class after the other forgets the first: "
            "shuffle the rows, as DistributedSampler(rows) does by default",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def _label_of(samples: int, mu_obs: Any, selected: Any) -> bytes:
    """Return the observations of a row, if all rows have the same; b"" if not."""
    label = b""
    for values in (mu_obs, selected):
        if values is None:
            continue
        if not isinstance(values, np.ndarray) or not samples or values.size % samples:
            return b""
        rows = values.reshape(samples, -1)
        first = rows[0]
        if first[0] != rows[-1, 0] or not (rows == first).all():
            return b""
        label += first.tobytes()
    return label
