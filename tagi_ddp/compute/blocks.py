"""Blocks: layers in a row, and residual blocks around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tagi_ddp.compute.activations import Activation
from tagi_ddp.compute.layer import Layer
from tagi_ddp.compute.states import Deltas, States


class Chain(Layer):
    """Layers in a row: a LayerBlock, or a whole network."""

    def __init__(self, handle: Any, layers: Sequence[Layer]) -> None:
        """Take the layers in order."""
        super().__init__(handle)
        self._layers = list(layers)
        for before, layer in zip(layers, layers[1:], strict=False):
            if isinstance(layer, Activation):
                layer.in_place = not before.keeps_output
        self.keeps_output = self._layers[-1].keeps_output

    def parts(self) -> list[Layer]:
        """Return the layers inside."""
        return [part for layer in self._layers for part in layer.parts()]

    def forward(self, states: States, training: bool) -> States:
        """Call one after the other."""
        for layer in self._layers:
            states = layer.forward(states, training)
        return states

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Call one after the other, the last one first."""
        for layer in self._layers[:0:-1]:
            deltas = layer.backward(deltas, True)
        return self._layers[0].backward(deltas, to_input)
