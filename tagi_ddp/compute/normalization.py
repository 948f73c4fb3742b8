"""Normalization: z = w (a - m) / sqrt(v + epsilon) + b, where m and v have no uncertainty.

As in the engine, the variance v of a sample includes the inputs' own variances:
(sum (a - m)^2 + sum var a) / (n - 1). Each feature has a weight and a bias; features are the
channels of images, [batch, features, n], or the elements of vectors, n = 1.
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
from tagi_ddp.engine.options import batch_norm_options, norm_epsilon


@dataclass(slots=True)
class _Saved:
    """Values of a batch that backward needs."""

    spread: Tensor  # (a - m) sqrt(var w / (v + epsilon))
    slope: Tensor  # w / sqrt(v + epsilon), in a shape that broadcasts
    jacobian: Jacobian | None


class Normalization(Layer):
    """The common base of the kinds of normalization, which differ in the sample only."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._inputs: int | None = None  # elements of a sample; None: any number
        self._saved: _Saved | None = None

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on, one for each feature."""
        self._weights, self._biases = weights, biases

    @abstractmethod
    def _center(
        self, mean: Tensor, variance: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return a - m in new memory, and 1 / sqrt(v + epsilon) in a shape that broadcasts."""

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
        """Sum over batch and positions, as a linear layer with one input x for each output does."""
        assert self._saved is not None
        saved, self._saved = self._saved, None
        weights, biases = self._weights, self._biases
        spread, shape = saved.spread, saved.spread.shape
        below = Deltas(deltas.mean.reshape(shape), deltas.variance.reshape(shape))
        by_mean, mean_sum = _sums(below.mean, spread)
        by_variance, variance_sum = _sums(below.variance, spread.mul_(spread))
        # The spread has the factor sqrt(var w) already, its square has var w.
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
    """A sample is a feature's values in the batch; in evaluation m and v are running averages."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._epsilon, self._momentum = batch_norm_options(handle)

    def bind_statistics(self, mean: Tensor, variance: Tensor, first: NDArray[np.uint8]) -> None:
        """Use these running averages, and the flag of the first batch, on the host."""
        self._mean, self._variance, self._first = mean, variance, first

    def _center(
        self, mean: Tensor, variance: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        # The first batch's statistics replace the initial ones. If the first batch is one in
        # evaluation, the initial ones are averaged with later batches'.
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
    """A sample is all the values of an input."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._epsilon = norm_epsilon(handle)
        self._inputs = int(handle.input_size)

    def _center(
        self, mean: Tensor, variance: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        one = (1, len(mean), -1)
        flat = None if variance is None else variance.reshape(one)
        centered, _, sample_variance = _sample(mean.reshape(one), flat)
        return centered.view_as(mean), (sample_variance + self._epsilon).rsqrt_()[:, None, None]


def _sample(mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a - m in new memory, m and v; each index of dimension 1 is a sample."""
    count = mean.shape[0] * mean.shape[2]
    sample_mean = mean.sum((0, 2)).div_(count)
    centered = mean - sample_mean[:, None]
    total, _ = _sums(centered, centered)
    if variance is not None:
        total += variance.sum((0, 2))
    return centered, sample_mean, total.div_(count - 1)


def _sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of x y and of x over all dimensions but 1, in one pass.

    They are gradients of torch's batch normalization, with inputs y of mean 0 and variance 1.
    """
    zeros, ones = torch.zeros_like(x[0, :, 0]), torch.ones_like(x[0, :, 0])
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        x, y, ones, zeros, ones, zeros, ones, True, 0.0, [False, True, True]
    )
    return products, sums
