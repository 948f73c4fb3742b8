"""Linear layers: z = W a + b.

Source of the formulas: Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference for
Bayesian neural networks, JMLR 22 (2021), equations 8 to 17.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.states import Deltas, States, scale

_LARGE = 250_000  # multiplications: oneDNN and torch's default take the same time


class Linear(Layer):
    """Weights are [outputs, inputs]."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._inputs, self._outputs = int(handle.input_size), int(handle.output_size)
        self._saved: States | None = None
        self._squares: Tensor | None = None  # of the saved means

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on."""
        self._weights = weights.viewed(self._outputs, self._inputs)
        self._mu_t, self._var_t = self._weights.mu.t(), self._weights.var.t()
        self._biases = biases

    def forward(self, states: States, training: bool) -> States:
        """Propagate: mean W a + b; variance (W^2 + var W) var a + var W a^2 + var b."""
        mean, variance = states.viewed(self._inputs)
        mu, var, biases = self._mu_t, self._var_t, self._biases
        squares = mean * mean
        if training:
            self._saved, self._squares = States(mean, None, states.jacobian), squares
        else:
            self._saved = self._squares = None
        mean_out = self._product(mean, mu, None if biases is None else biases.mu)
        variance_out = self._product(squares, var, None if biases is None else biases.var)
        if variance is not None:
            moments = torch.addcmul(var, mu, mu)
            variance_out = self._product(variance, moments, variance_out)
        return States(mean_out, variance_out)

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Sum over the batch: delta W = var W (dm^T a), delta var W = var W^2 (dv^T a^2)."""
        assert self._saved is not None
        assert self._squares is not None
        mean_delta = deltas.mean.view(-1, self._outputs)
        variance_delta = deltas.variance.view(-1, self._outputs)
        weights, biases = self._weights, self._biases
        sums = self._product(mean_delta.t(), self._saved.mean)
        torch.mul(sums, weights.var, out=weights.delta_mu)
        sums = self._product(variance_delta.t(), self._squares)
        torch.mul(sums, weights.var, out=weights.delta_var).mul_(weights.var)
        if biases is not None:
            torch.sum(mean_delta, 0, out=biases.delta_mu)
            torch.sum(variance_delta, 0, out=biases.delta_var)
            biases.scale_deltas()
        if not to_input:
            return deltas
        below = Deltas(
            self._product(mean_delta, weights.mu),
            self._product(variance_delta, weights.mu * weights.mu),
        )
        return scale(self._saved.jacobian, below)

    def _product(self, x: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
        if self.dtype == torch.float32:
            return product(x, right, added)
        output = product(x.to(self.dtype), right.to(self.dtype)).float()
        return output if added is None else output.add_(added)


def product(x: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    """Return x right, and what is ``added``: a row for all rows, or a matrix, which may change.

    Large ones on the CPU by oneDNN, which torch takes for convolutions but not for matrices: twice
    as fast as its default on AMD's processors. Of small ones the default is faster, by up to five
    times.
    """
    large = x.shape[0] * right.numel() > _LARGE
    if large and x.is_cpu and torch.backends.mkldnn.is_available():
        row = added if added is not None and added.dim() == 1 else None
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, right.t(), row, "none", [], "")
        return output if added is None or added is row else output.add_(added)
    return torch.mm(x, right) if added is None else torch.addmm(added, x, right)
