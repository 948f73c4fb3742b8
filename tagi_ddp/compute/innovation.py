"""The innovation of outputs from observations, with which a backward pass begins.

Sources: Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference for Bayesian neural
networks, JMLR 22 (2021); for an unknown noise, Deka, Nguyen, Goulet, Analytically tractable
heteroscedastic uncertainty quantification in Bayesian neural networks for regression tasks,
Neurocomputing 572 (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp import kernels
from tagi_ddp.compute.states import Deltas, States


def innovation(states: States, mu_obs: Tensor, var_obs: Tensor) -> Deltas:
    """Return the innovation from observations of all outputs, in the outputs' shape.

    With jacobian J and s = var + var_obs: mean J (y - mu) / s, variance -J^2 / s. It is zero if
    y is NaN or J / s is not finite.
    """
    mean, y = states.mean, mu_obs.view_as(states.mean)
    variance = var_obs.view_as(mean)
    if on_gpu := kernels.find(mean):
        slope = None if states.jacobian is None else states.jacobian.tensor()
        tensors = (mean, states.variance, slope, y.float(), variance.float())
        return Deltas(*on_gpu.innovation(*(None if t is None else t.contiguous() for t in tensors)))
    if states.variance is not None:
        variance = states.variance + variance
    if states.jacobian is None:
        gain = variance.reciprocal()
        shrunk = gain.neg()
    else:
        jacobian = states.jacobian.tensor()
        gain = jacobian / variance
        shrunk = (gain * jacobian).neg_()
    unseen = torch.isnan((gain - gain).add_(y))  # x - x is 0, or NaN if x is not finite.
    moved = (y - mean).mul_(gain)
    return Deltas(moved.masked_fill_(unseen, 0), shrunk.masked_fill_(unseen, 0))


def selected_innovation(
    states: States, mu_obs: Tensor, var_obs: Tensor, selected: Tensor
) -> Deltas:
    """Return the innovation from observations of selected outputs; zero for the others.

    ``selected`` holds the number of the output, counted from 1, of each observation.
    """
    batch = states.batch
    index = selected.view(batch, -1).long() - 1
    flat = (part.reshape(batch, -1) for part in _parts(states))
    mean, variance, jacobian = (part.gather(1, index) for part in flat)
    gain = jacobian / (variance + var_obs.view_as(mean))
    y = mu_obs.view_as(mean)
    seen = torch.isfinite(gain) & ~torch.isnan(y)
    zero = torch.zeros_like(gain)
    deltas = [torch.zeros_like(states.mean).reshape(batch, -1) for _ in range(2)]
    deltas[0].scatter_(1, index, torch.where(seen, gain * (y - mean), zero))
    deltas[1].scatter_(1, index, torch.where(seen, -gain * jacobian, zero))
    return Deltas(*(part.view_as(states.mean) for part in deltas))


def heteroscedastic_innovation(states: States, mu_obs: Tensor) -> Deltas:
    """Return the innovation of pairs of outputs: a value, and the variance of its noise.

    ``mu_obs`` has one observation a pair. The noise is V ~ N(0, v). The second output is the
    expectation of V^2, and its posterior follows from the posterior of V given y.
    """
    mean, variance, jacobian = (part.reshape(-1, 2) for part in _parts(states))
    y = mu_obs.reshape(-1)
    noise, noise_variance = mean[:, 1], variance[:, 1]
    total = variance[:, 0] + noise
    gain = jacobian[:, 0] / total
    observed = torch.isfinite(y)
    seen = observed & torch.isfinite(gain)
    zero = torch.zeros_like(gain)
    error = y - mean[:, 0]

    mu_v = noise / total * error  # V given y
    var_v = noise - noise / total * noise
    mu_square = mu_v * mu_v + var_v  # V^2 given y
    var_square = 2 * var_v * var_v + 4 * var_v * mu_v * mu_v
    prior = 3 * noise_variance + 2 * noise * noise  # the variance of V^2 before
    smoothing = noise_variance / prior
    slope = jacobian[:, 1] / noise_variance
    slope = torch.where(torch.isfinite(slope), slope, zero)
    moved = slope * (smoothing * (mu_square - noise))
    shrunk = slope * slope * (smoothing * smoothing * (var_square - prior))

    means = torch.stack(
        [torch.where(seen, gain * error, zero), torch.where(observed, moved, zero)], 1
    )
    variances = torch.stack(
        [torch.where(seen, -gain * jacobian[:, 0], zero), torch.where(observed, shrunk, zero)], 1
    )
    return Deltas(means.view_as(states.mean), variances.view_as(states.mean))


def _parts(states: States) -> tuple[Tensor, Tensor, Tensor]:
    return states.mean, states.variance_tensor(), states.jacobian_tensor()
