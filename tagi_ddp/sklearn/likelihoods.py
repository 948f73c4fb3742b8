"""Likelihoods of targets by a network's outputs, and the pool of networks and a linear model.

Targets are arrays of one row a sample. Likelihoods are sent to the ranks of a training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.data.classes import ClassTree
from tagi_ddp.data.metrics import gaussian_log_density
from tagi_ddp.sklearn.lines import LogisticLine, StraightLine, best_powers

Array = NDArray[Any]
Predict = Callable[[Array], Array]

# The ratio of the initial weights of the noise's outputs to those of the values. It is small: at
# first the noise is nearly the same everywhere.
_NOISE_GAIN = 0.1
# The share of the variance between networks' means that is added. Deviations are scaled to errors
# of single networks, which include that variance already, but only near samples. With 1, 3 of 19
# sets of `python -m benchmarks estimators` have more than 97 % in 90 % intervals.
_DISAGREEMENT = 0.5
_LEAST_VARIANCE = 1e-24  # the least variance of scaled targets; float32 resolves 1e-14


@dataclass(frozen=True)
class Normal:
    """Targets with normal noise of these standard deviations; None: it is learned (AGVI)."""

    targets: int
    deviations: tuple[float, ...] | None

    @property
    def learns_noise(self) -> bool:
        """True if every second output is the expected variance of the noise of the one before."""
        return self.deviations is None

    @property
    def outputs(self) -> int:
        """The number of outputs of the last linear layer."""
        return 2 * self.targets if self.learns_noise else self.targets

    def observe(self, targets: Array) -> dict[str, Array]:
        """Return the arguments of `learn` without the inputs, each with a row a sample."""
        observed = {"mu_obs": np.ascontiguousarray(targets, np.float32)}
        if self.deviations is not None:
            variances = np.square(np.array(self.deviations, np.float32))
            observed["var_obs"] = np.tile(variances, (len(targets), 1))
        return observed

    def predict(self, mean: Array, variance: Array) -> Array:
        """Return the prediction of the targets from flat outputs.

        It holds means and variances, [2, samples, targets], of new observations.
        """
        mean = mean.astype(np.float64).reshape(-1, self.outputs)
        variance = variance.astype(np.float64).reshape(-1, self.outputs)
        if self.deviations is None:
            return np.stack([mean[:, ::2], variance[:, ::2] + mean[:, 1::2]])
        return np.stack([mean, variance + np.square(self.deviations)])

    def mixture(self, predictions: Array) -> Array:
        """Return the mixture of predictions, [networks, ...], of equally probable networks."""
        mean, variance = np.moveaxis(predictions, 1, 0)
        disagreement = _DISAGREEMENT * mean.var(axis=0)
        return np.stack([mean.mean(axis=0), variance.mean(axis=0) + disagreement])

    def line(self, x: Array, targets: Array) -> StraightLine:
        """Return a linear model of the targets; its ``predict(x)`` returns a prediction."""
        return StraightLine(x, targets)

    def pooled(self, line: Array, networks: Array, powers: Array) -> Array:
        """Return the prediction with a density proportional to ``line^a * networks^b``.

        It is normal, with the weighted sum of precisions. ``powers`` are a and b, [2, targets].
        """
        mean, variance = np.stack([line, networks], axis=1)
        precision = powers[:, None] / np.maximum(variance, _LEAST_VARIANCE)
        total = precision.sum(axis=0)
        return np.stack([(precision * mean).sum(axis=0) / total, 1 / total])

    def powers(self, line: Array, networks: Array, targets: Array) -> Array:
        """Return the powers that maximize the likelihood of the targets."""

        def likelihood(number: int) -> Callable[[Array], float]:
            one = slice(number, number + 1)
            parts = line[..., one], networks[..., one]
            return lambda powers: float(
                self.log(self.pooled(*parts, powers[:, None]), targets[:, one]).sum()
            )

        return np.stack([best_powers(likelihood(number)) for number in range(self.targets)], axis=1)

    def log(self, prediction: Array, targets: Array) -> Array:
        """Return the log-likelihood of each target, [samples, targets], by a prediction."""
        mean, variance = prediction
        return gaussian_log_density(targets, mean, variance)


@dataclass(frozen=True)
class Classes:
    """Classes as a binary tree of decisions with normal noise: hierarchical softmax.

    Targets are the numbers of the classes, one column. The methods are those of `Normal`, but a
    prediction is the probabilities of the classes, [samples, classes].
    """

    count: int
    deviation: float
    learns_noise = False

    @cached_property
    def _tree(self) -> ClassTree:
        return ClassTree(self.count)

    @property
    def outputs(self) -> int:
        return self._tree.outputs

    def observe(self, targets: Array) -> dict[str, Array]:
        decisions, numbers = self._tree.decisions(targets[:, 0])
        noise = np.full(decisions.shape, self.deviation**2, np.float32)
        return {"mu_obs": decisions, "var_obs": noise, "selected_idx": numbers}

    def predict(self, mean: Array, variance: Array) -> Array:
        return self._tree.probabilities(mean, variance)

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
        chosen = prediction[np.arange(len(targets)), targets[:, 0]]
        return np.asarray(np.log(np.maximum(chosen, np.finfo(np.float64).tiny)))


Likelihood: TypeAlias = Normal | Classes


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
        line, together = np.concatenate(predictions, axis=-2)  # of all samples
        powers = likelihood.powers(line, together, targets[rows])
        return cls(likelihood, likelihood.line(x, targets), powers)

    def predict(self, x: Array, predictions: Sequence[Array]) -> Array:
        """Return the pooled prediction for ``x``, from the linear model and each network's one."""
        together = self.likelihood.mixture(np.stack(predictions))
        return self.likelihood.pooled(self.line.predict(x), together, self.powers)


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
