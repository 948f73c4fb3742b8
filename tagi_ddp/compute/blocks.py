"""Blocks: chains of layers, and residual blocks around them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.activations import Activation, ReLU
from tagi_ddp.compute.layer import Layer
from tagi_ddp.compute.linear import Linear
from tagi_ddp.compute.states import Deltas, Jacobian, States, scale


class Chain(Layer):
    """Consecutive layers: a whole network, or the inside of a block."""

    def __init__(self, handle: Any, layers: Sequence[Layer]) -> None:
        super().__init__(handle)
        self.layers = list(layers)
        for before, layer in pairwise(layers):
            if isinstance(layer, Activation):
                layer.in_place = not before.keeps_output
            if isinstance(before, Linear):
                before.rectifies = isinstance(layer, ReLU)
        self.keeps_output = self.layers[-1].keeps_output

    def parts(self) -> list[Layer]:
        """Return the layers inside."""
        return [part for layer in self.layers for part in layer.parts()]

    def forward(self, states: States, training: bool) -> States:
        """Call each layer in turn."""
        for layer in self.layers:
            states = layer.forward(states, training)
        return states

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Call each layer in turn, the last one first."""
        for layer in self.layers[:0:-1]:
            deltas = layer.backward(deltas, True)
        return self.layers[0].backward(deltas, to_input)


class LayerBlock(Chain):
    """The engine's chain, whose backward skips a layer that is alone in it.

    The parameters of such a layer keep their deltas.
    """

    def forward(self, states: States, training: bool) -> States:
        self._input = states.mean.shape
        return super().forward(states, training)

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Call each layer in turn, the last one first; leave the innovation of a single one."""
        if len(self.layers) > 1:
            return super().backward(deltas, to_input)
        # The engine uses the output's buffer as the input's, even if the sizes differ.
        shape = self._input
        return Deltas(_resized(deltas.mean, shape), _resized(deltas.variance, shape))


class ResNetBlock(Layer):
    """A main block plus a shortcut, which may be a layer: z = main(a) + shortcut(a).

    The two are treated as independent. As in the engine, the jacobian of an activation at the end
    of a branch is dropped.
    """

    def __init__(self, handle: Any, main: Layer, shortcut: Layer | None) -> None:
        """Store both branches; ``shortcut`` None is the identity."""
        super().__init__(handle)
        self._main, self._shortcut = main, shortcut
        self._jacobian: Jacobian | None = None

    def parts(self) -> list[Layer]:
        """Return the layers inside, the main block's first."""
        return self._main.parts() + ([] if self._shortcut is None else self._shortcut.parts())

    def forward(self, states: States, training: bool) -> States:
        """Add the branches' means, and their variances."""
        self._jacobian = states.jacobian if training and self._shortcut is None else None
        main, other = self._main.forward(states, training), states
        if self._shortcut is not None:
            other = self._shortcut.forward(states, training)
        in_place = not self._main.keeps_output
        mean = _sum(main.mean, other.mean, in_place)
        if main.variance is None or other.variance is None:
            variance = other.variance if main.variance is None else main.variance
        else:
            variance = _sum(main.variance, other.variance, in_place)
        return States(mean, variance)

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Propagate the innovation through both branches, and add their results."""
        copy = Deltas(deltas.mean.clone(), deltas.variance.clone())
        below = self._main.backward(deltas, to_input)
        if self._shortcut is None:
            other = scale(self._jacobian, copy)
        else:
            other = self._shortcut.backward(copy, to_input)
        if not to_input:
            return below
        return Deltas(
            _sum(below.mean, other.mean, in_place=True),
            _sum(below.variance, other.variance, in_place=True),
        )


def _sum(a: Tensor, b: Tensor, in_place: bool) -> Tensor:
    b = b.reshape(a.shape)
    return a.add_(b) if in_place else a + b


def _resized(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return the tensor in another shape, cut or padded with zeros at its end."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, shape.numel() - flat.numel())).view(shape)
