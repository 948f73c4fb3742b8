"""Pooling: the mean, or the largest mean, of a window that slides over each channel.

As in the engine, padding counts as zeros in a mean, and never in a maximum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.convolution import cropped, padded
from tagi_ddp.compute.layer import Layer
from tagi_ddp.compute.states import Deltas, Jacobian, States, scale
from tagi_ddp.engine.options import window_of


class _Pool2d(Layer):
    """Images are [batch, channels, rows, columns]."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._input = (int(handle.in_channels), int(handle.in_height), int(handle.in_width))
        self._output = (int(handle.out_channels), int(handle.out_height), int(handle.out_width))
        self._window = window_of(handle)
        self._jacobian: Jacobian | None = None


class AvgPool2d(_Pool2d):
    """Mean of means, and variance sum var / n^2, of the window's n elements.

    It is computed as a convolution of each channel with weights 1 / n: torch's kernel for
    convolutions is up to ten times faster than the one for pooling.
    """

    def forward(self, states: States, training: bool) -> States:
        """Average."""
        mean, variance = states.viewed(*self._input)
        self._jacobian = states.jacobian if training else None
        return States(
            self._averaged(mean, 1), None if variance is None else self._averaged(variance, 2)
        )

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Spread over the window: dm / n, dv / n^2."""
        if not to_input:
            return deltas
        below = Deltas(self._spread(deltas.mean, 1), self._spread(deltas.variance, 2))
        return scale(self._jacobian, below)

    def _averaged(self, images: Tensor, power: int) -> Tensor:
        return self._convolve(padded(images, self._window.extra), power, False)

    def _spread(self, delta: Tensor, power: int) -> Tensor:
        delta = delta.reshape(-1, *self._output)
        return cropped(self._convolve(delta, power, True), self._window.extra)

    def _convolve(self, images: Tensor, power: int, transposed: bool) -> Tensor:
        window, channels = self._window, self._input[0]
        weights = images.new_full(
            (channels, 1, window.kernel, window.kernel), window.kernel ** (-2 * power)
        )
        stride, padding = [window.stride] * 2, [window.before] * 2
        return torch.convolution(
            images, weights, None, stride, padding, [1, 1], transposed, [0, 0], channels
        )


class MaxPool2d(_Pool2d):
    """Mean and variance of the first element with the largest mean."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        window = self._window
        self._padding, self._sides = window.before, [0, 0]
        # torch pads all sides equally, and by at most half of the kernel.
        if window.extra or 2 * window.before > window.kernel:
            self._padding, self._sides = 0, [window.before, window.after]
        self._indices: Tensor | None = None

    def forward(self, states: States, training: bool) -> States:
        """Choose; torch's kernel is some four times faster with the channels last."""
        mean, variance = states.viewed(*self._input)
        window = self._window
        mean, indices = torch.ops.aten.max_pool2d_with_indices(
            self._padded(mean, -torch.inf).contiguous(memory_format=torch.channels_last),
            [window.kernel] * 2,
            [window.stride] * 2,
            [self._padding] * 2,
        )
        # A single channel or pixel may keep the strides of channels last, which later layers use.
        mean, indices = mean.flatten(1).view(mean.shape), indices.flatten(2)
        if variance is not None:
            variance = self._padded(variance, 0.0).flatten(2).gather(2, indices).view_as(mean)
        self._jacobian = states.jacobian if training else None
        self._indices = indices if training else None
        return States(mean, variance)

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Add the innovation to the chosen elements; it is a sum if windows overlap."""
        if not to_input:
            return deltas
        below = Deltas(self._returned(deltas.mean), self._returned(deltas.variance))
        return scale(self._jacobian, below)

    def _padded(self, images: Tensor, value: float) -> Tensor:
        if not any(self._sides):
            return images
        return torch.constant_pad_nd(images, self._sides * 2, value)

    def _returned(self, delta: Tensor) -> Tensor:
        assert self._indices is not None
        (channels, rows, columns), (first, last) = self._input, self._sides
        size = rows + first + last, columns + first + last
        below = delta.new_zeros(len(self._indices), channels, size[0] * size[1])
        below.scatter_add_(2, self._indices, delta.reshape(self._indices.shape))
        images = below.view(-1, channels, *size)
        return images[..., first : first + rows, first : first + columns].contiguous()
