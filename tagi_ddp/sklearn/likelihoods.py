"""What the outputs of a network say of the targets: how they are learned, and how likely they are.

Targets are arrays of one row a sample. Both classes travel to the ranks of a training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Of the weights that the noise's outputs begin with, to those of the values: at first it is alike
# everywhere.
_NOISE_GAIN = 0.1
# The width of a decision, however sure its output is: J.-A. Goulet et al., Tractable approximate
# Gaussian inference for Bayesian neural networks, JMLR 22 (2021).
_SPREAD = 1 / 3


class Likelihood(Protocol):
    """Of the targets, given a network's outputs."""

    @property
    def outputs(self) -> int:
        """How many outputs the last linear layer has."""
        ...

    @property
    def learns_noise(self) -> bool:
        """Whether every second output is the expected variance of the noise of the one before."""
        ...

    def observe(self, targets: Array) -> dict[str, Array]:
        """Return the arguments of `learn` but for the inputs, each with a row a sample."""
        ...

    def predict(self, mean: Array, variance: Array) -> Any:
        """Return what all outputs, flat, say of the targets: moments, or probabilities."""
        ...

    def log(self, mean: Array, variance: Array, targets: Array) -> float:
        """Return the mean log-likelihood of the targets, given all outputs, flat."""
        ...


@dataclass(frozen=True)
class Normal:
    """Targets with normal noise of these standard deviations; None: it is learned (AGVI)."""

    targets: int
    deviations: tuple[float, ...] | None

    @property
    def learns_noise(self) -> bool:
        return self.deviations is None

    @property
    def outputs(self) -> int:
        return 2 * self.targets if self.learns_noise else self.targets

    def observe(self, targets: Array) -> dict[str, Array]:
        observed = {"mu_obs": np.ascontiguousarray(targets, np.float32)}
        if self.deviations is not None:
            variances = np.square(np.array(self.deviations, np.float32))
            observed["var_obs"] = np.tile(variances, (len(targets), 1))
        return observed

    def predict(self, mean: Array, variance: Array) -> tuple[Array, Array]:
        """Return means and variances, [samples, targets], of what will be observed."""
        mean = mean.astype(np.float64).reshape(-1, self.outputs)
        variance = variance.astype(np.float64).reshape(-1, self.outputs)
        if self.deviations is None:
            return mean[:, ::2], variance[:, ::2] + mean[:, 1::2]
        return mean, variance + np.square(self.deviations)

    def log(self, mean: Array, variance: Array, targets: Array) -> float:
        mean, variance = self.predict(mean, variance)
        terms = np.square(targets - mean) / variance + np.log(2 * np.pi * variance)
        return float(-0.5 * terms.mean())


@dataclass(frozen=True)
class Classes:
    """So many classes, by a binary tree of decisions with normal noise: hierarchical softmax.

    Targets are the numbers of the classes, one column. Probabilities are those of pytagi's
    `Utils.obs_to_label_prob`, divided by their sum.
    """

    count: int
    deviation: float
    learns_noise = False

    @cached_property
    def _tree(self) -> tuple[Array, Array]:
        """Return of each class the decisions that lead to it, 1 or -1, and their outputs from 0."""
        from pytagi import Utils

        labels = np.arange(self.count, dtype=np.int32)
        decisions, numbers, depth = Utils().label_to_obs(labels, self.count)
        return decisions.reshape(-1, depth), numbers.reshape(-1, depth).astype(np.int32) - 1

    @property
    def outputs(self) -> int:
        return int(self._tree[1].max()) + 1

    def observe(self, targets: Array) -> dict[str, Array]:
        decisions, numbers = (part[targets[:, 0]] for part in self._tree)
        return {
            "mu_obs": decisions.astype(np.float32),
            "var_obs": np.full(decisions.shape, self.deviation**2, np.float32),
            "selected_idx": numbers + 1,
        }

    def predict(self, mean: Array, variance: Array) -> Array:
        """Return the probabilities of the classes, [samples, classes]."""
        decisions, numbers = self._tree
        mean = mean.astype(np.float64).reshape(-1, self.outputs)
        variance = variance.astype(np.float64).reshape(mean.shape)
        score = (mean / np.sqrt(variance + _SPREAD**2))[:, numbers] * decisions
        logs = _log_normal(score).sum(axis=2)
        logs -= logs.max(axis=1, keepdims=True)
        probabilities = np.exp(logs)  # not all leaves of the tree are classes
        return np.asarray(probabilities / probabilities.sum(axis=1, keepdims=True))

    def log(self, mean: Array, variance: Array, targets: Array) -> float:
        probabilities = self.predict(mean, variance)
        chosen = probabilities[np.arange(len(targets)), targets[:, 0]]
        return float(np.log(np.maximum(chosen, np.finfo(float).tiny)).mean())


def begin_noise_even(network: Any, likelihood: Likelihood) -> None:
    """Let the outputs of the noise begin with small weights."""
    handle = network.layers[-2]
    for name in ("mu_w", "var_w"):
        rows = np.array(getattr(handle, name), np.float32).reshape(likelihood.outputs, -1)
        rows[1::2] *= _NOISE_GAIN if name == "mu_w" else _NOISE_GAIN**2
        setattr(handle, name, rows.ravel().tolist())


def _log_normal(values: Array) -> Array:
    """Return the logarithm of the normal distribution function."""
    from scipy.special import log_ndtr

    return np.asarray(log_ndtr(values))
