"""Convolutions and their transposes: z = W * a + b.

Source of the formulas: Goulet, Nguyen, Amiri, Tractable approximate Gaussian inference for
Bayesian neural networks, JMLR 22 (2021), equations 8 to 17; here the sums over inputs are
convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.states import Deltas, States, scale
from tagi_ddp.engine.options import window_of


class Conv2d(Layer):
    """Weights are [outputs, inputs, kernel, kernel]; images are [batch, channels, rows, columns].

    The formula also holds if the stride is larger than the kernel, or the network's input is a
    rectangular image; the engine is undefined there.
    """

    transposed = False

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._input = (int(handle.in_channels), int(handle.in_height), int(handle.in_width))
        self._output = (int(handle.out_channels), int(handle.out_height), int(handle.out_width))
        window = window_of(handle)
        self._kernel, self._stride, self._padding = window.kernel, window.stride, window.before
        # torch pads all sides equally. The additional padding on the right and at the bottom is
        # done here, on the larger of the two images.
        sides = 0, window.extra
        self._extra_input, self._extra_output = sides if self.transposed else sides[::-1]
        self._saved: States | None = None

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on."""
        channels = self._output[0], self._input[0]
        first, second = reversed(channels) if self.transposed else channels
        self._weights = weights.viewed(first, second, self._kernel, self._kernel)
        self._biases = biases

    def forward(self, states: States, training: bool) -> States:
        """Propagate: mean W a + b; variance (W^2 + var W) var a + var W a^2 + var b."""
        mean, variance = states.viewed(*self._input)
        self._saved = States(mean, None, states.jacobian) if training else None
        weights, biases = self._weights, self._biases
        mean = padded(mean, self._extra_input)
        mean_out = self._convolve(mean, weights.mu, None if biases is None else biases.mu)
        variance_out = self._convolve(
            mean * mean, weights.var, None if biases is None else biases.var
        )
        if variance is not None:
            squares = torch.addcmul(weights.var, weights.mu, weights.mu)
            variance = padded(variance, self._extra_input)
            variance_out.add_(self._convolve(variance, squares, None))
        return States(
            cropped(mean_out, self._extra_output), cropped(variance_out, self._extra_output)
        )

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Sum over batch and pixels: delta W = var W (dm * a), delta var W = var W^2 (dv * a^2)."""
        assert self._saved is not None
        weights, biases = self._weights, self._biases
        mean = padded(self._saved.mean, self._extra_input)
        mean_below, sums, bias_sums = self._correlate(deltas.mean, mean, weights.mu, to_input)
        torch.mul(sums, weights.var, out=weights.delta_mu)
        if biases is not None:
            torch.mul(bias_sums, biases.var, out=biases.delta_mu)
        variance_below, sums, bias_sums = self._correlate(
            deltas.variance, mean * mean, weights.mu * weights.mu, to_input
        )
        torch.mul(sums, weights.var, out=weights.delta_var).mul_(weights.var)
        if biases is not None:
            torch.mul(bias_sums, biases.var, out=biases.delta_var).mul_(biases.var)
        if not to_input:
            return deltas
        below = Deltas(
            cropped(mean_below, self._extra_input), cropped(variance_below, self._extra_input)
        )
        return scale(self._saved.jacobian, below)

    def _convolve(self, images: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        if self.dtype == torch.float32:
            return torch.convolution(images, weights, bias, *self._geometry())
        images, weights = images.to(self.dtype), weights.to(self.dtype)
        output = torch.convolution(images, weights, None, *self._geometry()).float()
        return output if bias is None else output.add_(bias[:, None, None])

    def _correlate(
        self, delta: Tensor, images: Tensor, weights: Tensor, to_input: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums for images (if ``to_input``), weights and biases (if there are any)."""
        delta = padded(delta.reshape(-1, *self._output), self._extra_output)
        below, sums, bias_sums = torch.ops.aten.convolution_backward(
            delta.to(self.dtype),
            images.to(self.dtype),
            weights.to(self.dtype),
            [self._output[0]],
            *self._geometry(),
            [to_input, True, self._biases is not None],
        )
        return (
            below.float() if to_input else delta,
            sums.float(),
            sums if self._biases is None else bias_sums.float(),
        )

    def _geometry(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        """Return stride, padding, dilation, transposed, output padding and groups."""
        stride, padding = [self._stride] * 2, [self._padding] * 2
        return stride, padding, [1, 1], self.transposed, [0, 0], 1


class ConvTranspose2d(Conv2d):
    """Weights are [inputs, outputs, kernel, kernel]; padding crops the output."""

    transposed = True


def padded(images: Tensor, extra: int) -> Tensor:
    """Return images with ``extra`` columns and rows of zeros on the right and at the bottom."""
    return torch.constant_pad_nd(images, [0, extra, 0, extra]) if extra else images


def cropped(images: Tensor, extra: int) -> Tensor:
    """Return images without the last ``extra`` columns and rows."""
    return images[..., :-extra, :-extra].contiguous() if extra else images
