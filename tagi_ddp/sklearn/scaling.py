"""The scales of inputs and targets: means and standard deviations by column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Networks learn nothing from values so many deviations from the mean, or raise an error.
_FAR = 100.0
# A value of `_OUTLIER` deviations would dominate a stream's deviation from then on. Values are
# checked after `_ENOUGH` rows.
_OUTLIER, _ENOUGH = 1e6, 100


@dataclass(frozen=True)
class Moments:
    """Moments of ``count`` rows by column: mean, sum of squared deviations, largest magnitude."""

    count: int
    mean: Array
    squares: Array
    largest: Array

    @classmethod
    def of(cls, rows: Array) -> Moments:
        """Return the moments of rows, [samples, columns]."""
        mean = rows.mean(axis=0)
        largest = np.abs(rows).max(axis=0)
        return cls(len(rows), mean, np.square(rows - mean).sum(axis=0), largest)

    def with_rows(self, rows: Array) -> Moments:
        """Return the moments of the rows so far and of these."""
        new = Moments.of(rows)
        count, step = self.count + new.count, new.mean - self.mean
        return Moments(
            count,
            self.mean + step * (new.count / count),
            self.squares + new.squares + np.square(step) * (self.count * new.count / count),
            np.maximum(self.largest, new.largest),
        )

    @property
    def scale(self) -> Array:
        """The standard deviations, 1 for columns of equal values."""
        deviation = np.sqrt(self.squares / self.count)
        if not np.isfinite(deviation).all():
            raise ValueError(f"values as large as {self.largest.max():.2g} cannot be scaled")
        return np.where(deviation > 10 * np.finfo(float).eps * self.largest, deviation, 1)

    def refuse_outliers(self, name: str, rows: Array) -> None:
        """Raise ValueError if a value of ``rows`` is much too far from the rows so far."""
        if self.count < _ENOUGH:
            return
        distance = np.abs(rows - self.mean).max(axis=0) / self.scale
        distance[self.squares == 0] = 0
        column = int(distance.argmax())
        if distance[column] > _OUTLIER:
            raise ValueError(
                f"{name} has a value in column {column} that is {distance[column]:.2g} standard "
                "deviations from all samples so far: leave it out, or begin anew"
            )


def require_near(name: str, scaled: Array) -> None:
    """Raise ValueError if most values of a column are far from those of `fit`, as in other units.

    ``scaled``: the rows of the argument ``name``, less the means, divided by the deviations.
    """
    distance = np.median(np.abs(scaled), axis=0)
    column = int(distance.argmax())
    if distance[column] > _FAR:
        raise ValueError(
            f"{name} is {distance[column]:.2g} standard deviations from the samples of fit, in "
            f"column {column}: give the units of fit, or fit anew"
        )


def refuse_masked(**arguments: Any) -> None:
    """Raise ValueError that names the first argument with masked values.

    scikit-learn would use the values below the mask.
    """
    for name, value in arguments.items():
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise ValueError(
                f"{name} has {np.ma.count_masked(value)} masked values: fill them, as by "
                f"{name}.filled(), or leave out their samples"
            )
