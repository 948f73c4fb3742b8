"""Normalization: z = w (a - m) / sqrt(v + epsilon) + b, with m and v taken as known.

The variance v of a sample counts the inputs' own variances: (sum (a - m)^2 + sum var a) / (n - 1).
Weights and biases belong to features: the channels of images, [batch, features, n], or the
elements of vectors, n = 1. As the engine computes it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.states import Deltas, Jacobian, States, require_inputs, scale
from tagi_ddp.engine.normalization import batch_norm_options, layer_norm_epsilon


@dataclass(slots=True)
class _Saved:
    """What backward needs of a batch."""

    spread: Tensor  # (a - m) sqrt(var w / (v + epsilon))
    slope: Tensor  # w / sqrt(v + epsilon), as it broadcasts
    jacobian: Jacobian | None


class Normalization(Layer):
    """What the kinds have in common: all but the sample."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._inputs: int | None = None  # elements of a sample; None: any images, or vectors
        self._saved: _Saved | None = None

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on, one for each feature."""
        self._weights, self._biases = weights, biases

    @abstractmethod
    def _center(
        self, mean: Tensor, variance: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return a - m in new memory, and 1 / sqrt(v + epsilon) as it broadcasts."""

    def forward(self, states: States, training: bool) -> States:
        """Propagate: with x the normalized input, mean w x + b, variance
        (w^2 + var w) var x + var w x^2 + var b.
        """
        weights, biases = self._weights, self._biases
        mean, variance = states.mean, states.variance
        if self._inputs is not None:
            require_inputs(self._inputs, mean)
        shape = (states.batch, weights.mu.numel(), -1)
        mean = mean.reshape(shape)
        variance = None if variance is None else variance.reshape(shape)
        centered, factor = self._center(mean, variance, training)
        slope = factor * weights.mu[:, None]
        mean_out = centered * slope
        spread = centered.mul_(factor * weights.var.sqrt()[:, None])
        if variance is None:
            variance_out = spread * spread
        else:
            squares = torch.addcmul(weights.var, weights.mu, weights.mu)[:, None]
            variance_out = variance * (factor * factor * squares)
            variance_out.addcmul_(spread, spread)
        if biases is not None:
            mean_out += biases.mu[:, None]
            variance_out += biases.var[:, None]
        self._saved = _Saved(spread, slope, states.jacobian) if training else None
        return States(mean_out.view_as(states.mean), variance_out.view_as(states.mean))

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Sum over batch and positions, as in a linear layer with the input x for each output."""
        assert self._saved is not None
        saved, self._saved = self._saved, None
        weights, biases = self._weights, self._biases
        spread, shape = saved.spread, saved.spread.shape
        below = Deltas(deltas.mean.reshape(shape), deltas.variance.reshape(shape))
        by_mean, mean_sum = _sums(below.mean, spread)
        by_variance, variance_sum = _sums(below.variance, spread.mul_(spread))
        # The spread holds sqrt(var w) already, its square var w.
        torch.mul(by_mean, weights.var.sqrt(), out=weights.delta_mu)
        torch.mul(by_variance, weights.var, out=weights.delta_var)
        if biases is not None:
            torch.mul(mean_sum, biases.var, out=biases.delta_mu)
            torch.mul(variance_sum, biases.var * biases.var, out=biases.delta_var)
        if not to_input:
            return deltas
        below.mean *= saved.slope
        below.variance *= saved.slope * saved.slope
        return scale(saved.jacobian, below)


class BatchNorm2d(Normalization):
    """Samples are a feature's values in the batch; in evaluation, m and v are running averages."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._epsilon, self._momentum = batch_norm_options(handle)

    def bind_statistics(self, mean: Tensor, variance: Tensor, first: NDArray[np.uint8]) -> None:
        """Use these running averages, and the flag of the first batch, on the host."""
        self._mean, self._variance, self._first = mean, variance, first

    def _center(
        self, mean: Tensor, variance: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        # The first batch's statistics replace what was there; one in evaluation counts as first,
        # too, so that what was there is averaged with later ones.
        momentum = 0.0 if self._first[0] else self._momentum
        self._first[0] = 0
        if training:
            centered, sample_mean, sample_variance = _sample(mean, variance)
            self._mean.mul_(momentum).add_(sample_mean, alpha=1 - momentum)
            self._variance.mul_(momentum).add_(sample_variance, alpha=1 - momentum)
        else:
            centered, sample_variance = mean - self._mean[:, None], self._variance
        return centered, (sample_variance + self._epsilon).rsqrt_()[:, None]


class LayerNorm(Normalization):
    """Samples are all the values of an input."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._epsilon = layer_norm_epsilon(handle)
        self._inputs = int(handle.input_size)

    def _center(
        self, mean: Tensor, variance: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        one = (1, len(mean), -1)
        flat = None if variance is None else variance.reshape(one)
        centered, _, sample_variance = _sample(mean.reshape(one), flat)
        return centered.view_as(mean), (sample_variance + self._epsilon).rsqrt_()[:, None, None]


def _sample(mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a - m in new memory, m, and v, of the samples of dimension 1."""
    count = mean.shape[0] * mean.shape[2]
    sample_mean = mean.sum((0, 2)).div_(count)
    centered = mean - sample_mean[:, None]
    total, _ = _sums(centered, centered)
    if variance is not None:
        total += variance.sum((0, 2))
    return centered, sample_mean, total.div_(count - 1)


def _sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of x y and of x over all dimensions but 1, in one pass.

    They are a gradient of torch's batch normalization, of inputs y with mean 0 and variance 1.
    """
    zeros, ones = torch.zeros_like(x[0, :, 0]), torch.ones_like(x[0, :, 0])
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        x, y, ones, zeros, ones, zeros, ones, True, 0.0, [False, True, True]
    )
    return products, sums
