"""Activations over all outputs of a sample: probabilities of classes.

As in the engine, their jacobians are diagonal: the innovation of an output does not change the
others'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp.compute.activations import LEAST, Activation, rectified_moments
from tagi_ddp.compute.states import Dense, States


class Softmax(Activation):
    """exp(z) / sum exp(z), linearized.

    The sum is the engine's: over as many consecutive elements as the batch has samples, not over a
    sample's outputs. The two are the same if there are as many outputs as samples.
    """

    def forward(self, states: States, training: bool) -> States:
        """Normalize."""
        mean = states.mean.reshape(-1, states.batch)
        variance = states.variance_tensor().reshape(-1, states.batch)
        output = mean.softmax(1)
        slope = (1 - output).mul_(output)
        largest = variance.gather(1, mean.argmax(1, keepdim=True))
        moment = (variance + largest).mul_(slope).mul_(slope)
        return _shaped(states, output, moment, slope)


class Remax(Activation):
    """max(0, z) / sum max(0, z), by the moments of the logarithms of normal variables."""

    def forward(self, states: States, training: bool) -> States:
        """Normalize."""
        mean, variance = _rows(states)
        rectified, spread, positive = rectified_moments(mean, variance)
        total = rectified.sum(1, keepdim=True)
        log_mean, log_variance = _log_normal(rectified, spread)
        total_mean, total_variance = _log_normal(total, spread.sum(1, keepdim=True))
        covariance = _log_1(spread * (1 / total) * (1 / rectified))
        log_output = (log_variance + total_variance).sub_(covariance, alpha=2)
        output = torch.add(log_mean - total_mean, log_output, alpha=0.5).exp_()
        output = torch.fmax(output, LEAST, out=output)
        output.div_(output.sum(1, keepdim=True))
        moment = log_output.exp_().sub_(1).mul_(output * output)
        slope = log_variance.sub_(covariance).exp_().sub_(1).mul_(output).mul_(rectified)
        bound = moment.sqrt().mul_(variance.sqrt())
        slope = torch.fmin(bound, slope.div_(positive)).div_(variance)
        return _shaped(states, output, moment, slope)


class ClosedFormSoftmax(Activation):
    """exp(z) / sum exp(z), by the moments of log-normal variables."""

    def forward(self, states: States, training: bool) -> States:
        """Normalize."""
        mean, variance = _rows(states)
        exponential = torch.add(mean, variance, alpha=0.5).exp_()
        spread = torch.add(variance, mean, alpha=2).exp_().mul_(variance.exp().sub_(1))
        total = exponential.sum(1, keepdim=True)
        total_mean, total_variance = _log_normal(total, spread.sum(1, keepdim=True))
        covariance = _log_1(spread.mul_(1 / exponential.mul_(total)))
        log_output = (variance + total_variance).sub_(covariance, alpha=2)
        output = torch.add(mean - total_mean, log_output, alpha=0.5).exp_()
        moment = log_output.exp_().sub_(1).mul_(output).mul_(output)
        slope = (variance - covariance).mul_(output).div_(variance)
        return _shaped(states, output, moment, slope)


def _rows(states: States) -> tuple[Tensor, Tensor]:
    return states.mean.reshape(states.batch, -1), states.variance_tensor().reshape(states.batch, -1)


def _log_1(tensor: Tensor) -> Tensor:
    # log1p would differ: the engine rounds the sum.
    return tensor.add_(1).log_()


def _log_normal(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of log(x), from those of a log-normal variable x."""
    log_variance = _log_1(variance / (mean * mean))
    return torch.sub(mean.log(), log_variance, alpha=0.5), log_variance


def _shaped(states: States, mean: Tensor, variance: Tensor, slope: Tensor) -> States:
    shape = states.mean.shape
    return States(mean.view(shape), variance.view(shape), Dense(slope.view(shape)))
