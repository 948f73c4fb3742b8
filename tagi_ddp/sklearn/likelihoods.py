"""Likelihoods of targets given a network's outputs: how targets are observed and predicted.

Targets are arrays of one row a sample. Both classes are sent to the ranks of a training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.data.metrics import gaussian_log_density
from tagi_ddp.sklearn.lines import LogisticLine, StraightLine, best_powers

Array = NDArray[Any]

# The ratio of the initial weights of the noise's outputs to those of the values. It is small: at
# first the noise is nearly the same everywhere.
_NOISE_GAIN = 0.1
# The width of a decision, even if its output is certain: J.-A. Goulet et al., Tractable approximate
# Gaussian inference for Bayesian neural networks, JMLR 22 (2021).
_SPREAD = 1 / 3
# The share of the variance between networks' means that is added. Deviations are scaled to errors
# of single networks, which include that variance already, but only near samples. With 1, 3 of 19
# sets of `python -m benchmarks estimators` have more than 97 % in 90 % intervals.
_DISAGREEMENT = 0.5
_LEAST_VARIANCE = 1e-24  # the least variance of scaled targets; float32 resolves 1e-14


class Likelihood(Protocol):
    """The likelihood of targets, given a network's outputs."""

    @property
    def outputs(self) -> int:
        """The number of outputs of the last linear layer."""
        ...

    @property
    def learns_noise(self) -> bool:
        """True if every second output is the expected variance of the noise of the one before."""
        ...

    def observe(self, targets: Array) -> dict[str, Array]:
        """Return the arguments of `learn` without the inputs, each with a row a sample."""
        ...

    def predict(self, mean: Array, variance: Array) -> Array:
        """Return the prediction of the targets from flat outputs; its axis -2 is the samples."""
        ...

    def mixture(self, predictions: Array) -> Array:
        """Return the mixture of predictions, [networks, ...], of equally probable networks."""
        ...

    def line(self, x: Array, targets: Array) -> Any:
        """Return a linear model of the targets; its ``predict(x)`` returns a prediction."""
        ...

    def pooled(self, line: Array, networks: Array, powers: Array) -> Array:
        """Return the prediction with a density proportional to ``line^a * networks^b``.

        Args:
            line, networks: predictions.
            powers: a and b.
        """
        ...

    def powers(self, line: Array, networks: Array, targets: Array) -> Array:
        """Return the powers that maximize the likelihood of the targets."""
        ...

    def log(self, prediction: Array, targets: Array) -> Array:
        """Return the log-likelihood of each target, given a prediction."""
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

    def predict(self, mean: Array, variance: Array) -> Array:
        """Return means and variances, [2, samples, targets], of new observations."""
        mean = mean.astype(np.float64).reshape(-1, self.outputs)
        variance = variance.astype(np.float64).reshape(-1, self.outputs)
        if self.deviations is None:
            return np.stack([mean[:, ::2], variance[:, ::2] + mean[:, 1::2]])
        return np.stack([mean, variance + np.square(self.deviations)])

    def mixture(self, predictions: Array) -> Array:
        mean, variance = np.moveaxis(predictions, 1, 0)
        disagreement = _DISAGREEMENT * mean.var(axis=0)
        return np.stack([mean.mean(axis=0), variance.mean(axis=0) + disagreement])

    def line(self, x: Array, targets: Array) -> StraightLine:
        return StraightLine(x, targets)

    def pooled(self, line: Array, networks: Array, powers: Array) -> Array:
        """Return the normal density with the weighted sum of precisions; powers: [2, targets]."""
        mean, variance = np.stack([line, networks], axis=1)
        precision = powers[:, None] / np.maximum(variance, _LEAST_VARIANCE)
        total = precision.sum(axis=0)
        return np.stack([(precision * mean).sum(axis=0) / total, 1 / total])

    def powers(self, line: Array, networks: Array, targets: Array) -> Array:
        def likelihood(number: int) -> Callable[[Array], float]:
            one = slice(number, number + 1)
            parts = line[..., one], networks[..., one]
            return lambda powers: float(
                self.log(self.pooled(*parts, powers[:, None]), targets[:, one]).sum()
            )

        return np.stack([best_powers(likelihood(number)) for number in range(self.targets)], axis=1)

    def log(self, prediction: Array, targets: Array) -> Array:
        """Return log-likelihoods, [samples, targets]."""
        mean, variance = prediction
        return gaussian_log_density(targets, mean, variance)


@dataclass(frozen=True)
class Classes:
    """Classes as a binary tree of decisions with normal noise: hierarchical softmax.

    Targets are the numbers of the classes, one column. Probabilities are those of pytagi's
    `Utils.obs_to_label_prob`, divided by their sum.
    """

    count: int
    deviation: float
    learns_noise = False

    @cached_property
    def _tree(self) -> tuple[Array, Array]:
        """The decisions, 1 or -1, that lead to each class, and their outputs, counted from 0."""
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
        return _probabilities(logs)  # Not all leaves of the tree are classes.

    def mixture(self, predictions: Array) -> Array:
        return np.asarray(predictions.mean(axis=0))

    def line(self, x: Array, targets: Array) -> LogisticLine:
        return LogisticLine(x, targets, self.count)

    def pooled(self, line: Array, networks: Array, powers: Array) -> Array:
        smallest = np.finfo(np.float64).tiny
        logs = [np.log(np.maximum(each, smallest)) for each in (line, networks)]
        return _probabilities(powers[0] * logs[0] + powers[1] * logs[1])

    def powers(self, line: Array, networks: Array, targets: Array) -> Array:
        return best_powers(
            lambda powers: float(self.log(self.pooled(line, networks, powers), targets).sum())
        )

    def log(self, prediction: Array, targets: Array) -> Array:
        """Return log-likelihoods, [samples]."""
        chosen = prediction[np.arange(len(targets)), targets[:, 0]]
        return np.asarray(np.log(np.maximum(chosen, np.finfo(np.float64).tiny)))


def begin_noise_even(network: Any, likelihood: Likelihood) -> None:
    """Reduce the initial weights of the noise's outputs."""
    handle = network.layers[-2]
    for name in ("mu_w", "var_w"):
        rows = np.array(getattr(handle, name), np.float32).reshape(likelihood.outputs, -1)
        rows[1::2] *= _NOISE_GAIN if name == "mu_w" else _NOISE_GAIN**2
        setattr(handle, name, rows.ravel().tolist())


def _probabilities(logs: Array) -> Array:
    """Return probabilities, [samples, classes], from logarithms with any constant a sample."""
    scaled = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(scaled / scaled.sum(axis=1, keepdims=True))


def _log_normal(values: Array) -> Array:
    """Return the logarithm of the normal distribution function."""
    from scipy.special import log_ndtr

    return np.asarray(log_ndtr(values))
