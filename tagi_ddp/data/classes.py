"""Classes as a tree of decisions, their probabilities by a network, and how good these are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer, whole_numbers

# The width of a decision, even if its output is certain: J.-A. Goulet et al., Tractable approximate
# Gaussian inference for Bayesian neural networks, JMLR 22 (2021).
_SPREAD = 1 / 3
_SMALLEST = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class ClassTree:
    """A binary tree of decisions that lead to ``count`` classes: pytagi's hierarchical softmax.

    A network for them ends in a Linear layer of `outputs`; each output is a decision, 1 or -1, with
    normal noise.
    """

    count: int

    def __post_init__(self) -> None:
        integer("count", self.count, 2)

    @cached_property
    def _paths(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """The decisions that lead to each class, and their outputs, counted from 1."""
        from pytagi import Utils

        labels = np.arange(self.count, dtype=np.int32)
        decisions, numbers, depth = Utils().label_to_obs(labels, self.count)
        return (
            np.array(decisions, np.float32).reshape(-1, depth),
            np.array(numbers, np.int32).reshape(-1, depth),
        )

    @property
    def outputs(self) -> int:
        """The number of outputs of the network's last layer."""
        return int(self._paths[1].max())

    def decisions(
        self, labels: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return ``mu_obs`` and ``selected_idx`` of `DDPSequential.learn`, [samples, depth] each.

        ``labels`` are the numbers of the classes, from 0 on. Raises ValueError for others.
        """
        numbers = _labels(labels, self.count)
        decisions, outputs = self._paths
        return decisions[numbers], outputs[numbers]

    def probabilities(
        self, mean: npt.ArrayLike, variance: npt.ArrayLike
    ) -> npt.NDArray[np.float64]:
        """Return the probabilities of the classes, [samples, classes]; each row adds up to 1.

        ``mean`` and ``variance`` are a network's outputs, flat or [samples, outputs]. They are
        those of pytagi's ``Utils.obs_to_label_prob`` for each sample, divided by their sum: not all
        leaves of the tree are classes.
        """
        shape = -1, self.outputs
        means = np.asarray(mean, np.float64)
        if means.size % self.outputs or np.size(variance) != means.size:
            raise ValueError(
                f"mean has {means.size} and variance {np.size(variance)} elements; give the "
                f"{self.outputs} outputs of each sample"
            )
        variances = np.asarray(variance, np.float64).reshape(shape)
        score = means.reshape(shape) / np.sqrt(variances + _SPREAD**2)
        # The probability of the less probable decision keeps its digits.
        less = np.maximum(_erfc(np.abs(score) / math.sqrt(2)) / 2, _SMALLEST)
        either = np.stack([np.log1p(-less), np.log(less)])
        logs = np.where(score > 0, either, either[::-1])  # of the decisions 1 and -1
        decisions, outputs = self._paths
        sums = logs[(decisions < 0).astype(int), :, outputs - 1].sum(1).T
        found: npt.NDArray[np.float64] = np.exp(sums - sums.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        return found


@dataclass(frozen=True)
class ClassScores:
    """Scores of probabilities of classes, means over all samples.

    error: the share of samples whose most probable class is not theirs. log_likelihood: the mean
    logarithm of the probability of each sample's class, in nats. calibration_error: the mean
    distance between confidence and accuracy, over the bins of `reliability`, weighted by their
    samples: M. P. Naeini, G. F. Cooper, M. Hauskrecht, AAAI (2015).
    """

    error: float
    log_likelihood: float
    calibration_error: float


@dataclass(frozen=True)
class Reliability:
    """The samples by their confidence, the probability of the most probable class, in bins.

    counts: the samples of each bin. confidence and accuracy: their means there, NaN in empty bins.
    """

    counts: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64]


def reliability(probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = 10) -> Reliability:
    """Return confidence and accuracy by bins of equal width from 0 to 1.

    Args:
        probabilities: [samples, classes], of all ranks together; `gather` brings them together.
        labels: the number of each sample's class.
        bins: their number.
    """
    chosen, numbers = _checked(probabilities, labels)
    integer("bins", bins, 1)
    confidence = chosen.max(axis=1)
    right = chosen.argmax(axis=1) == numbers
    index = np.minimum((bins * confidence).astype(int), bins - 1)
    counts = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 in an empty bin
        means = [np.bincount(index, part, bins) / counts for part in (confidence, right)]
    return Reliability(counts, *means)


def class_scores(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = 10
) -> ClassScores:
    """Return scores of probabilities of classes; the arguments are those of `reliability`."""
    chosen, numbers = _checked(probabilities, labels)
    found = reliability(chosen, numbers, bins)
    gaps = found.counts * np.abs(found.confidence - found.accuracy)
    of_labels = np.maximum(chosen[np.arange(len(numbers)), numbers], _SMALLEST)
    return ClassScores(
        error=float(np.mean(chosen.argmax(axis=1) != numbers)),
        log_likelihood=float(np.log(of_labels).mean()),
        calibration_error=float(np.nansum(gaps)) / len(numbers),
    )


def _checked(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    chosen = np.asarray(probabilities, np.float64)
    numbers = _labels(labels, chosen.shape[-1] if chosen.ndim else 0)
    if chosen.ndim != 2 or len(chosen) != len(numbers) or not len(numbers):
        raise ValueError(
            f"probabilities has the shape {chosen.shape} and labels {len(numbers)} elements; give "
            "[samples, classes] and one label for each sample"
        )
    return chosen, numbers


def _labels(labels: npt.ArrayLike, classes: int) -> npt.NDArray[np.int32]:
    """Return the numbers of classes, flat; raise ValueError unless there are such classes."""
    numbers: npt.NDArray[np.int32] = whole_numbers("labels", labels)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < classes:
        raise ValueError(
            f"labels go from {numbers.min()} to {numbers.max()}; give numbers from 0 to "
            f"{classes - 1}"
        )
    return numbers


def _erfc(values: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """Return the complementary error function, which numpy lacks."""
    return np.fromiter(map(math.erfc, values.ravel()), np.float64, values.size).reshape(
        values.shape
    )
