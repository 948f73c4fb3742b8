"""Linear layers: z = W a + b.

Source of the formulas: Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference for
Bayesian neural networks, JMLR 22 (2021), equations 8 to 17.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tagi_ddp import kernels
from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.states import Deltas, Rectified, States, scale

_LARGE = 250_000  # multiplications of which oneDNN and torch's default take the same time
_MOST_BY_KERNELS = 1 << 30  # multiplications up to which kernels are as fast as cuBLAS


class Linear(Layer):
    """Weights are [outputs, inputs]."""

    #: True if the next layer is a ReLU, which a kernel can compute together with this one.
    rectifies = False

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._inputs, self._outputs = int(handle.input_size), int(handle.output_size)
        self._saved: States | None = None

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on."""
        self._weights = weights.viewed(self._outputs, self._inputs)
        self._biases = biases

    def forward(self, states: States, training: bool) -> States:
        """Propagate: mean W a + b; variance (W^2 + var W) var a + var W a^2 + var b."""
        mean, variance = states.viewed(self._inputs)
        weights, biases = self._weights, self._biases
        self._saved = States(mean, None, states.jacobian) if training else None
        if on_gpu := self._kernels(mean):
            mean_out, variance_out = on_gpu.forward(
                mean.contiguous(),
                None if variance is None else variance.contiguous(),
                (weights.mu, weights.var),
                None if biases is None else (biases.mu, biases.var),
                self.rectifies,
                _uses_tf32(),
            )
            jacobian = Rectified(mean_out) if self.rectifies else None
            return States(mean_out, variance_out, jacobian)
        mean_out = self._product(mean, weights.mu, None if biases is None else biases.mu)
        variance_out = self._product(
            mean * mean, weights.var, None if biases is None else biases.var
        )
        if variance is not None:
            squares = torch.addcmul(weights.var, weights.mu, weights.mu)
            variance_out = self._product(variance, squares, variance_out)
        return States(mean_out, variance_out)

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Sum over the batch: delta W = var W (dm^T a), delta var W = var W^2 (dv^T a^2)."""
        assert self._saved is not None
        mean = self._saved.mean
        mean_delta = deltas.mean.view(-1, self._outputs)
        variance_delta = deltas.variance.view(-1, self._outputs)
        weights, biases = self._weights, self._biases
        if on_gpu := self._kernels(mean):
            return self._backward_by(on_gpu, Deltas(mean_delta, variance_delta), to_input)
        sums = self._product(mean_delta.t(), mean.t())
        torch.mul(sums, weights.var, out=weights.delta_mu)
        sums = self._product(variance_delta.t(), (mean * mean).t())
        torch.mul(sums, weights.var, out=weights.delta_var).mul_(weights.var)
        if biases is not None:
            torch.sum(mean_delta, 0, out=biases.delta_mu)
            torch.sum(variance_delta, 0, out=biases.delta_var)
            biases.scale_deltas()
        if not to_input:
            return deltas
        below = Deltas(
            self._product(mean_delta, weights.mu.t()),
            self._product(variance_delta, (weights.mu * weights.mu).t()),
        )
        return scale(self._saved.jacobian, below)

    def _kernels(self, mean: Tensor) -> ModuleType | None:
        """Return kernels that are faster than torch's operators for these inputs."""
        small = mean.shape[0] * self._inputs * self._outputs <= _MOST_BY_KERNELS
        return kernels.find(mean) if small and len(mean) and self.dtype == torch.float32 else None

    def _backward_by(self, on_gpu: ModuleType, deltas: Deltas, to_input: bool) -> Deltas:
        assert self._saved is not None
        weights, biases, jacobian = self._weights, self._biases, self._saved.jacobian
        innovation = deltas.mean.contiguous(), deltas.variance.contiguous()
        tf32 = _uses_tf32()
        on_gpu.write_deltas(
            innovation,
            self._saved.mean.contiguous(),
            weights.var,
            (weights.delta_mu, weights.delta_var),
            None if biases is None else biases.var,
            None if biases is None else (biases.delta_mu, biases.delta_var),
            tf32,
        )
        if not to_input:
            return deltas
        rectified = None
        if isinstance(jacobian, Rectified):
            rectified = jacobian.output.reshape(-1, self._inputs).contiguous()
        below = Deltas(*on_gpu.below(innovation, weights.mu, rectified, tf32))
        return below if rectified is not None else scale(jacobian, below)

    def _product(self, x: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
        if self.dtype == torch.float32:
            return product(x, weights, added)
        output = product(x.to(self.dtype), weights.to(self.dtype)).float()
        return output if added is None else output.add_(added)


def _uses_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def product(x: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
    """Return x weights^T + ``added``, which is a row for all rows, or a matrix, which may change.

    Large products on the CPU use oneDNN, which torch uses for convolutions but not for matrices; on
    AMD's processors it is twice as fast as torch's default. For small products the default is up to
    five times faster; then each operation counts, and `torch.nn.functional.linear` is two.
    """
    large = x.shape[0] * weights.numel() > _LARGE
    if large and x.is_cpu and torch.backends.mkldnn.is_available():
        row = added if added is not None and added.dim() == 1 else None
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weights, row, "none", [], "")
        return output if added is None or added is row else output.add_(added)
    if added is None:
        return torch.mm(x, weights.t())
    return torch.addmm(added, x, weights.t())
