"""Activations: functions of each element's Gaussian.

An activation has no backward of its own: the layer after it multiplies innovations by its
jacobian. The linearized ones follow Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference
for Bayesian neural networks, JMLR 22 (2021). The mixtures are the moments of a piecewise linear
function of a Gaussian. They are computed in the engine's order of operations, because most of a
small variance is rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Layer
from tagi_ddp.compute.states import Deltas, Dense, Rectified, States
from tagi_ddp.engine.dialect import dialect

#: The least mean and variance of mixtures. It is 0-dim, as that works with any device's tensors.
LEAST = torch.tensor(1e-6)

_LEAKY_SLOPE = 0.1  # The engine has no other slope.

# The function multiplies its first argument by the derivative at an output, into its third.
_Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


class Activation(Layer):
    """A layer without parameters whose output includes its jacobian."""

    #: True if forward may overwrite its input, which no other layer needs.
    in_place = False

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Return the innovation as it is: the layer after it has applied the jacobian already."""
        return deltas


class ReLU(Activation):
    """max(0, z): a negative mean and its variance become 0."""

    keeps_output = True

    def forward(self, states: States, training: bool) -> States:
        """Rectify, unless the layer before has done it."""
        mean, variance = states.mean, states.variance
        if isinstance(states.jacobian, Rectified) and states.jacobian.output is mean:
            return states
        mean = mean.relu_() if self.in_place else mean.relu()
        return States(mean, _where_positive(mean, variance, self.in_place), Rectified(mean))


def _where_positive(mean: Tensor, variance: Tensor | None, in_place: bool) -> Tensor | None:
    if variance is None:
        return None
    threshold = torch.ops.aten.threshold_backward
    if in_place:
        threshold.grad_input(variance, mean, 0.0, grad_input=variance)
        return variance
    result: Tensor = threshold(variance, mean, 0.0)
    return result


@dataclass(slots=True)
class _OfOutput:
    """A derivative that is a function of the activation's output. It is not stored."""

    output: Tensor
    multiply: _Multiply

    def scale(self, deltas: Deltas) -> Deltas:
        """Multiply the mean by the derivative, the variance by its square."""
        output = self.output.view_as(deltas.mean)
        self.multiply(deltas.mean, output, deltas.mean)
        self.square(deltas.variance, output, deltas.variance)
        return deltas

    def square(self, tensor: Tensor, output: Tensor, out: Tensor) -> Tensor:
        """Multiply by the square of the derivative."""
        self.multiply(tensor, output, out)
        return self.multiply(out, output, out)

    def tensor(self) -> Tensor:
        """Return the derivative."""
        ones = torch.ones_like(self.output)
        return self.multiply(ones, self.output, ones)


class _Linearized(Activation):
    """f(z) at the mean; the variance is multiplied by the square of the derivative there."""

    keeps_output = True
    _function: Callable[..., Tensor]
    _multiply: _Multiply

    def forward(self, states: States, training: bool) -> States:
        """Apply the function."""
        mean, variance = states.mean, states.variance
        kind = type(self)
        output = kind._function(mean, out=mean if self.in_place else torch.empty_like(mean))
        jacobian = _OfOutput(output, kind._multiply)
        if variance is not None:
            out = variance if self.in_place else torch.empty_like(variance)
            variance = jacobian.square(variance, output, out)
        return States(output, variance, jacobian)


def _by_sigmoid(tensor: Tensor, output: Tensor, out: Tensor) -> Tensor:
    torch.ops.aten.sigmoid_backward.grad_input(tensor, output, grad_input=out)
    return out


def _by_tanh(tensor: Tensor, output: Tensor, out: Tensor) -> Tensor:
    torch.ops.aten.tanh_backward.grad_input(tensor, output, grad_input=out)
    return out


def _by_leaky(tensor: Tensor, output: Tensor, out: Tensor) -> Tensor:
    backward = torch.ops.aten.leaky_relu_backward.grad_input
    backward(tensor, output, _LEAKY_SLOPE, True, grad_input=out)
    return out


def _leaky(mean: Tensor, out: Tensor) -> Tensor:
    torch.ops.aten.leaky_relu.out(mean, _LEAKY_SLOPE, out=out)
    return out


class Sigmoid(_Linearized):
    """1 / (1 + exp(-z))."""

    _function = staticmethod(torch.sigmoid)
    _multiply = staticmethod(_by_sigmoid)


class Tanh(_Linearized):
    """tanh(z)."""

    _function = staticmethod(torch.tanh)
    _multiply = staticmethod(_by_tanh)


class LeakyReLU(_Linearized):
    """z, or a tenth of it if it is negative."""

    _function = staticmethod(_leaky)
    _multiply = staticmethod(_by_leaky)


class Softplus(Activation):
    """log(1 + exp(z)), linearized. It overflows and cancels as the engine's does."""

    def forward(self, states: States, training: bool) -> States:
        """Apply the function."""
        mean, variance = states.mean, states.variance
        slope = mean.sigmoid()
        output = torch.exp(mean, out=mean if self.in_place else None).add_(1).log_()
        if variance is not None:
            variance = (slope * variance).mul_(slope)
        return States(output, variance, Dense(slope))


class MixtureReLU(Activation):
    """max(0, z), by its moments; the jacobian is the probability that z is positive."""

    def forward(self, states: States, training: bool) -> States:
        """Rectify."""
        mean, variance, probability = rectified_moments(states.mean, states.variance_tensor())
        return States(mean, variance, Dense(probability))


class MixtureTanh(Activation):
    """z between -1 and 1, by its moments."""

    def forward(self, states: States, training: bool) -> States:
        """Clip."""
        mean, variance, slope = _clipped_moments(states.mean, states.variance_tensor())
        return States(mean, _at_least(variance), Dense(slope))


class MixtureSigmoid(Activation):
    """(1 + z) / 2 between 0 and 1, by its moments."""

    def forward(self, states: States, training: bool) -> States:
        """Clip, then halve and shift."""
        mean, variance, slope = _clipped_moments(states.mean, states.variance_tensor())
        variance = _at_least(variance.div_(4))
        return States(mean.div_(2).add_(0.5), variance, Dense(slope.div_(2)))


class EvenExp(Activation):
    """Every second element becomes exp(z), log-normal; the others stay as they are.

    As in the engine, elements are counted through the batch, so an odd number of outputs swaps
    them in every other sample. The elements that stay keep their jacobian. That of the others is
    the mean of exp(z), or in some engines the covariance of z and exp(z): see `Dialect`.
    """

    def forward(self, states: States, training: bool) -> States:
        """Exponentiate every other element."""
        shape = states.mean.shape
        mean = states.mean.reshape(-1).clone()
        variance = states.variance_tensor().reshape(-1).clone()
        jacobian = states.jacobian_tensor().reshape(-1).clone()
        mu, var = mean[1::2], variance[1::2]
        exponential = torch.add(mu, var, alpha=0.5).exp_()
        jacobian[1::2] = exponential * var if dialect().exp_covariance else exponential
        var.copy_(torch.add(var, mu, alpha=2).exp_() * (var.exp() - 1))
        mu.copy_(exponential)
        return States(mean.view(shape), variance.view(shape), Dense(jacobian.view(shape)))


def rectified_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of max(0, z), at least `LEAST`, and P(z > 0)."""
    deviation = variance.sqrt()
    density, probability = _normal(mean / deviation)
    spread = deviation.mul_(density)
    output = torch.addcmul(spread, mean, probability)
    product = output * output
    product.sub_(output * mean, alpha=2).add_(spread.mul_(mean))
    moment = (variance - mean * mean).mul_(probability).sub_(product)
    return _at_least(output), _at_least(moment), probability


def _clipped_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of z clipped to [-1, 1], and P(-1 < z < 1)."""
    deviation = variance.sqrt()
    above, below = mean + 1, mean - 1
    density_l, cdf_l = _normal(above / deviation)
    density_u, cdf_u = _normal((1 - mean).div_(deviation))
    output = (above * cdf_l).add_(below * cdf_u)
    output.add_((density_l - density_u).mul_(deviation)).sub_(mean)
    square = mean * mean
    difference = variance - square
    moment = torch.sub(difference, mean, alpha=2).sub_(1).mul_(cdf_l)
    moment.add_(difference.add_(mean, alpha=2).sub_(1).mul_(cdf_u))
    moment.add_(below.mul_(density_u).sub_(above.mul_(density_l)).mul_(deviation))
    moment.sub_(output * output).add_(output * mean, alpha=2)
    moment.add_(square).sub_(variance).add_(2)
    return output, moment, cdf_u.add_(cdf_l).sub_(1)


def _normal(quantile: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard normal's density and distribution; overwrite the argument."""
    distribution = quantile.mul(-math.sqrt(0.5)).erfc_().mul_(0.5)
    density = quantile.mul_(quantile).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return density, distribution


def _at_least(tensor: Tensor) -> Tensor:
    """Raise elements to `LEAST` in place, also NaN, which is the result of exact zeros."""
    return torch.fmax(tensor, LEAST, out=tensor)
