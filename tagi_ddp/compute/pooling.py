"""Pooling: the mean, or the largest mean, of a window that slides over each channel.

As the engine computes it: padding counts as zeros in a mean, and never in a maximum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Layer
from tagi_ddp.compute.states import Deltas, Jacobian, States, scale
from tagi_ddp.engine.windows import window_of

_aten = torch.ops.aten


class _Pool2d(Layer):
    """Images are [batch, channels, rows, columns]."""

    def __init__(self, handle: Any) -> None:
        """Read the sizes and the window."""
        super().__init__(handle)
        self._input = (int(handle.in_channels), int(handle.in_height), int(handle.in_width))
        self._output = (int(handle.out_channels), int(handle.out_height), int(handle.out_width))
        window = window_of(handle)
        self._kernel, self._stride = [window.kernel] * 2, [window.stride] * 2
        self._padding, self._sides = [window.before] * 2, [0, 0, 0, 0]
        # torch pads all sides alike, and by no more than half of the kernel.
        if window.after != window.before or 2 * window.before > window.kernel:
            self._padding, self._sides = [0, 0], [window.before, window.after] * 2
        self._jacobian: Jacobian | None = None

    def _padded(self, images: Tensor, value: float = 0.0) -> Tensor:
        return torch.constant_pad_nd(images, self._sides, value) if any(self._sides) else images

    def _cropped(self, images: Tensor) -> Tensor:
        if not any(self._sides):
            return images
        (_, rows, columns), first = self._input, self._sides[0]
        return images[..., first : first + rows, first : first + columns].contiguous()

    def _padded_shape(self, delta: Tensor) -> Tensor:
        """Return a tensor of the padded input's shape and of any values, which takes no memory."""
        (channels, rows, columns), sides = self._input, sum(self._sides[:2])
        return delta.new_empty(()).expand(delta.shape[0], channels, rows + sides, columns + sides)


class AvgPool2d(_Pool2d):
    """Mean of means; variance sum var / n^2 of the window's n elements."""

    def forward(self, states: States, training: bool) -> States:
        """Average."""
        mean, variance = states.viewed(*self._input)
        self._jacobian = states.jacobian if training else None
        return States(
            self._averaged(mean, None),
            None if variance is None else self._averaged(variance, self._kernel[0] ** 4),
        )

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Spread over the window: dm / n, dv / n^2."""
        if not to_input:
            return deltas
        below = Deltas(
            self._spread(deltas.mean, None), self._spread(deltas.variance, self._kernel[0] ** 4)
        )
        return scale(self._jacobian, below)

    def _averaged(self, images: Tensor, divisor: int | None) -> Tensor:
        return _aten.avg_pool2d(
            self._padded(images), self._kernel, self._stride, self._padding, False, True, divisor
        )

    def _spread(self, delta: Tensor, divisor: int | None) -> Tensor:
        delta = delta.reshape(-1, *self._output)
        return self._cropped(
            _aten.avg_pool2d_backward(
                delta,
                self._padded_shape(delta),
                self._kernel,
                self._stride,
                self._padding,
                False,
                True,
                divisor,
            )
        )


class MaxPool2d(_Pool2d):
    """Mean and variance of the element with the largest mean: of the first, if several have it."""

    def __init__(self, handle: Any) -> None:
        """Read the sizes and the window."""
        super().__init__(handle)
        self._indices: Tensor | None = None

    def forward(self, states: States, training: bool) -> States:
        """Choose."""
        mean, variance = states.viewed(*self._input)
        mean, indices = _aten.max_pool2d_with_indices(
            self._padded(mean, -torch.inf), self._kernel, self._stride, self._padding
        )
        if variance is not None:
            chosen = self._padded(variance).flatten(2).gather(2, indices.flatten(2))
            variance = chosen.view_as(mean)
        self._jacobian = states.jacobian if training else None
        self._indices = indices if training else None
        return States(mean, variance)

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Give the innovation to the chosen elements: the sum, where windows overlap."""
        if not to_input:
            return deltas
        below = Deltas(self._returned(deltas.mean), self._returned(deltas.variance))
        return scale(self._jacobian, below)

    def _returned(self, delta: Tensor) -> Tensor:
        assert self._indices is not None
        delta = delta.reshape(-1, *self._output)
        return self._cropped(
            _aten.max_pool2d_with_indices_backward(
                delta,
                self._padded_shape(delta),
                self._kernel,
                self._stride,
                self._padding,
                [1, 1],
                False,
                self._indices,
            )
        )
