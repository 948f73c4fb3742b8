"""RMSNorm layers, as the engine computes them: z = w a / r, r^2 = mean of a^2 + epsilon.

By the rules of `linear` the variance of z would be (var a (w^2 + var w) + var w a^2) / r^2. The
engine multiplies that by var a once more, leaves the factor var w of the weights' deltas out, and
ignores the activation below. A network trained by another rule would not be the engine's, so
all of this is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.states import Deltas, States
from tagi_ddp.engine.options import norm_epsilon


@dataclass(slots=True)
class _Saved:
    normalized: Tensor  # a / r, [batch, inputs]
    slope: Tensor  # w / r


class RMSNorm(Layer):
    """Weights are one for each input; there are no biases."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._epsilon = norm_epsilon(handle)
        self._saved: _Saved | None = None

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on."""
        self._weights = weights

    def forward(self, states: States, training: bool) -> States:
        """Compute means and variances."""
        mean, variance = states.viewed(self.input_size)
        mu, var = self._weights.mu, self._weights.var
        scale = mean.square().mean(1, keepdim=True).add_(self._epsilon).rsqrt_()
        normalized = mean * scale
        if variance is None:
            spread = torch.zeros_like(mean)
        else:
            spread = torch.addcmul(var * mean.square(), variance, torch.addcmul(var, mu, mu))
            spread.mul_(variance).mul_(scale.square())
        self._saved = _Saved(normalized, scale * mu) if training else None
        return States(normalized * mu, spread)

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Sum over the batch."""
        saved, weights = self._saved, self._weights
        assert saved is not None
        torch.sum(saved.normalized * deltas.mean, 0, out=weights.delta_mu)
        torch.sum(saved.normalized.square() * deltas.variance, 0, out=weights.delta_var)
        if not to_input:
            return deltas
        return Deltas(deltas.mean * saved.slope, deltas.variance * saved.slope.square())
