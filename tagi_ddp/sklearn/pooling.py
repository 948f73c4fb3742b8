"""The pool of networks and a linear model, whose powers are fitted to left-out samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.sklearn.likelihoods import Likelihood

Array = NDArray[Any]
Predict = Callable[[Array], Array]


@dataclass(frozen=True)
class Pool:
    """The density of a target is proportional to ``line^a * networks^b``.

    Both are predictive densities. ``powers`` are a and b, for each target in a regression. This is
    the logarithmic opinion pool: C. Genest, J. V. Zidek, Combining probability distributions,
    Statistical Science 1 (1986).
    """

    likelihood: Likelihood
    line: Any
    powers: Array  # [2], or [2, targets]

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        networks: Sequence[Predict],
        parts: Sequence[Array],
        x: Array,
        targets: Array,
    ) -> Pool:
        """Choose the powers that make the left-out targets most likely.

        Args:
            networks: each predicts by the network that was trained without the part of its index.
            parts: the numbers of the samples that each network leaves out.
        """
        predictions: list[Array] = []
        for network, part in zip(networks, parts, strict=True):
            kept = np.delete(np.arange(len(x)), part)
            line = likelihood.line(x[kept], targets[kept])
            predictions.append(np.stack([line.predict(x[part]), network(x[part])]))
        rows = np.concatenate(parts)
        line, together = np.concatenate(predictions, axis=-2)
        powers = likelihood.powers(line, together, targets[rows])
        return cls(likelihood, likelihood.line(x, targets), powers)

    def predict(self, x: Array, predictions: Sequence[Array]) -> Array:
        """Return the pooled prediction for ``x``, from the linear model and each network's one."""
        together = self.likelihood.mixture(np.stack(predictions))
        return self.likelihood.pooled(self.line.predict(x), together, self.powers)
