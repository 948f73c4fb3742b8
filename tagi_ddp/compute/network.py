"""A pytagi network's forward and backward on torch's kernels, over the network's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.activations import ReLU
from tagi_ddp.compute.blocks import Chain, LayerBlock, ResNetBlock
from tagi_ddp.compute.convolution import Conv2d, ConvTranspose2d
from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.linear import Linear
from tagi_ddp.compute.normalization import BatchNorm2d, LayerNorm
from tagi_ddp.compute.pooling import AvgPool2d, MaxPool2d
from tagi_ddp.compute.states import Deltas, States
from tagi_ddp.engine.adapter import Replica

_KINDS: dict[str, Callable[[Any], Layer]] = {
    "Linear": Linear,
    "Conv2d": Conv2d,
    "ConvTranspose2d": ConvTranspose2d,
    "AvgPool2d": AvgPool2d,
    "MaxPool2d": MaxPool2d,
    "BatchNorm2d": BatchNorm2d,
    "LayerNorm": LayerNorm,
    "ReLU": ReLU,
}


def unsupported(model: Any) -> list[str]:
    """Return the kinds of the model's layers that torch does not compute here, each once."""
    return sorted(set(map(_kind, _leaves(model._cpp_backend.layers))) - set(_KINDS))


def _build(handle: Any) -> Layer:
    """Return the layer that computes what an engine's layer does."""
    kind = _kind(handle)
    if kind == "LayerBlock":
        return LayerBlock(handle, [_build(layer) for layer in handle.layers])
    if kind == "ResNetBlock":
        shortcut = None if handle.shortcut is None else _build(handle.shortcut)
        return ResNetBlock(handle, _build(handle.main_block), shortcut)
    return _KINDS[kind](handle)


class Network:
    """All layers of a replica, bound to its means and variances, and to a bucket for the deltas."""

    def __init__(self, model: Any, replica: Replica, deltas: Tensor) -> None:
        """Build the layers; ``deltas`` is [means | variances], float32."""
        self._replica = replica
        self._deltas = deltas
        self._chain = Chain(None, [_build(layer) for layer in model._cpp_backend.layers])
        #: the number of elements of one sample of the input
        self.input_size = self._chain.parts()[0].input_size
        self.bind()

    def bind(self) -> None:
        """Find the parameters again; call when `Replica.pull` tells that they have moved."""
        parts = {id(part.handle): part for part in self._chain.parts()}
        blocks = iter(self._replica.parameters.blocks)
        for layer, arrays in zip(self._replica.layers, self._replica.arrays(), strict=True):
            weights = self._gaussians(next(blocks), arrays["mu_w"], arrays["var_w"])
            offset, count = next(blocks)
            biases = None
            if count:
                biases = self._gaussians((offset, count), arrays["mu_b"], arrays["var_b"])
            part = parts[id(layer.handle)]
            part.bind(weights, biases)
            if isinstance(part, BatchNorm2d):
                part.bind_statistics(
                    torch.from_numpy(arrays["mu_ra"]),
                    torch.from_numpy(arrays["var_ra"]),
                    arrays["first_batch"],
                )

    def _gaussians(self, block: tuple[int, int], mu: Any, var: Any) -> Gaussians:
        offset, count = block
        means, variances = self._deltas.chunk(2)
        part = slice(offset, offset + count)
        return Gaussians(
            torch.from_numpy(mu), torch.from_numpy(var), means[part], variances[part]
        )

    def forward(self, mean: Tensor, variance: Tensor | None, training: bool) -> States:
        """Return the outputs, [batch, outputs], of inputs [batch, inputs]."""
        return self._chain.forward(States(mean, variance), training)

    def backward(self, deltas: Deltas, to_input: bool = False) -> Deltas:
        """Write all parameters' deltas; return the innovation of the inputs if asked for."""
        return self._chain.backward(deltas, to_input)


def _kind(handle: Any) -> str:
    return type(handle).__name__


def _leaves(handles: list[Any]) -> list[Any]:
    leaves: list[Any] = []
    for handle in handles:
        if _kind(handle) == "LayerBlock":
            leaves += _leaves(handle.layers)
        elif _kind(handle) == "ResNetBlock":
            leaves += _leaves([handle.main_block, *filter(None, [handle.shortcut])])
        else:
            leaves.append(handle)
    return leaves
