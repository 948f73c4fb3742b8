"""A pytagi network computed by torch's kernels, over the network's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.activations import (
    EvenExp,
    LeakyReLU,
    MixtureReLU,
    MixtureSigmoid,
    MixtureTanh,
    ReLU,
    Sigmoid,
    Softplus,
    Tanh,
)
from tagi_ddp.compute.blocks import Chain, LayerBlock, ResNetBlock
from tagi_ddp.compute.convolution import Conv2d, ConvTranspose2d
from tagi_ddp.compute.embedding import Embedding
from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.linear import Linear
from tagi_ddp.compute.linear_run import with_runs
from tagi_ddp.compute.lstm import LSTM
from tagi_ddp.compute.normalization import BatchNorm2d, LayerNorm
from tagi_ddp.compute.pooling import AvgPool2d, MaxPool2d
from tagi_ddp.compute.recurrent_lstm import RecurrentLSTM
from tagi_ddp.compute.rms_norm import RMSNorm
from tagi_ddp.compute.softmaxes import ClosedFormSoftmax, Remax, Softmax
from tagi_ddp.compute.states import Deltas, Jacobian, States
from tagi_ddp.engine.dialect import dialect
from tagi_ddp.engine.layers import walk
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.engine.shapes import input_rows, last_layer
from tagi_ddp.replica import Replica

_KINDS: dict[str, Callable[[Any], Layer]] = {
    "Linear": Linear,
    "Conv2d": Conv2d,
    "ConvTranspose2d": ConvTranspose2d,
    "AvgPool2d": AvgPool2d,
    "MaxPool2d": MaxPool2d,
    "BatchNorm2d": BatchNorm2d,
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
    "LSTM": LSTM,
    "Embedding": Embedding,
    "ReLU": ReLU,
    "Sigmoid": Sigmoid,
    "Tanh": Tanh,
    "LeakyReLU": LeakyReLU,
    "MixtureReLU": MixtureReLU,
    "MixtureSigmoid": MixtureSigmoid,
    "MixtureTanh": MixtureTanh,
    "MixtureSoftplus": Softplus,  # The engine linearizes it, in spite of the name.
    "EvenExp": EvenExp,
    "Softmax": Softmax,
    "Remax": Remax,
    "ClosedFormSoftmax": ClosedFormSoftmax,
}


def why_not(model: Any) -> str | None:
    """Return why the model's layers cannot be computed here, or None."""
    layers = list(walk(model))
    unknown = sorted({layer.kind for layer in layers} - set(_KINDS))
    if unknown:
        return f"torch does not compute {', '.join(unknown)} here"
    try:
        for layer in layers:
            if layer.kind != "Embedding":  # An Embedding would copy its deltas.
                _build(layer.handle)
    except (LayoutError, ValueError) as error:
        return str(error)
    return None


def _build(handle: Any) -> Layer:
    """Return the layer of this package for an engine's layer."""
    kind = type(handle).__name__
    if kind == "LayerBlock":
        return LayerBlock(handle, [_build(layer) for layer in handle.layers])
    if kind == "ResNetBlock":
        shortcut = None if handle.shortcut is None else _build(handle.shortcut)
        return ResNetBlock(handle, _build(handle.main_block), shortcut)
    if kind == "LSTM" and dialect().sequences:
        return RecurrentLSTM(handle)
    return _KINDS[kind](handle)


class Network:
    """All layers of a replica, bound to its means and variances and to a bucket for the deltas."""

    def __init__(
        self,
        model: Any,
        replica: Replica,
        deltas: Tensor,
        dtype: torch.dtype = torch.float32,
        kernels: bool = False,
    ) -> None:
        """Build the layers; ``deltas`` is [means | variances], float32.

        Matrix products and convolutions are computed in ``dtype``. If ``kernels``, the backend's
        kernels may compute Linear layers; they write deltas to the replica's bucket.
        """
        self._replica = replica
        self._deltas = deltas
        layers = [_build(layer) for layer in model._cpp_backend.layers]
        #: the LSTM layers by their index; as in the engine, without those inside blocks
        self.lstms = {i: layer for i, layer in enumerate(layers) if isinstance(layer, LSTM)}
        self._layers = with_runs(layers, replica) if kernels else layers
        self._chain = Chain(None, self._layers)
        for part in self._chain.parts():
            part.dtype = dtype
        self._stateful = [
            part for part in self._chain.parts() if isinstance(part, (LSTM, Embedding))
        ]
        #: the rows of a sample of the outputs
        self.out_rows = last_layer(model)[1].out_rows
        self._rows = input_rows(model)
        #: the number of elements of one sample of the input
        self.input_size = self._rows * self._chain.parts()[0].input_size
        self.bind()

    @property
    def embeddings(self) -> list[Embedding]:
        """The Embedding layers, in order."""
        return [part for part in self._stateful if isinstance(part, Embedding)]

    def keep(self) -> None:
        """Copy the state that forward and backward change, without running statistics."""
        for part in self._stateful:
            part.keep()

    def restore(self) -> None:
        """Restore the last copy of `keep`."""
        for part in self._stateful:
            part.restore()

    def restore_if(self, refused: Tensor) -> bool:
        """Restore it if ``refused`` is true; return False if only `restore` can do this."""
        return all(part.restore_if(refused) for part in self._stateful)

    @property
    def is_recurrent(self) -> bool:
        """True if a step uses states of an earlier step, other than parameters and deltas."""
        return any(isinstance(part, LSTM) for part in self._stateful)

    def bind(self) -> None:
        """Bind the parameters again; call it when `Replica.version` has changed."""
        parts = {id(part.handle): part for part in self._chain.parts()}
        self._begins: dict[Layer, int] = {}  # the first index of a layer in the flat sequence
        blocks = iter(self._replica.parameters.blocks)
        for layer, arrays in zip(self._replica.layers, self._replica.arrays(), strict=True):
            begin, count = next(blocks)
            weights = self._gaussians((begin, count), arrays["mu_w"], arrays["var_w"])
            offset, count = next(blocks)
            biases = None
            if count:
                biases = self._gaussians((offset, count), arrays["mu_b"], arrays["var_b"])
            part = parts[id(layer.handle)]
            part.bind(weights, biases)
            self._begins[part] = begin
            if isinstance(part, BatchNorm2d):
                part.bind_statistics(
                    torch.as_tensor(arrays["mu_ra"]),
                    torch.as_tensor(arrays["var_ra"]),
                    arrays["first_batch"],
                )

    def _gaussians(self, block: tuple[int, int], mu: Any, var: Any) -> Gaussians:
        offset, count = block
        means, variances = self._deltas.chunk(2)
        part = slice(offset, offset + count)
        return Gaussians(torch.as_tensor(mu), torch.as_tensor(var), means[part], variances[part])

    def forward(
        self,
        mean: Tensor,
        variance: Tensor | None,
        training: bool,
        jacobian: Jacobian | None = None,
    ) -> States:
        """Return the outputs, [batch * out_rows, outputs], of inputs [batch, inputs].

        ``jacobian`` is of the activation that computed the inputs, if there is one.
        """
        if self._rows > 1:
            mean = mean.reshape(len(mean) * self._rows, -1)
            variance = None if variance is None else variance.reshape(mean.shape)
        return self._chain.forward(States(mean, variance, jacobian), training)

    def backward(
        self,
        deltas: Deltas,
        to_input: bool = False,
        done: Callable[[int], None] | None = None,
    ) -> Deltas:
        """Write all parameters' deltas; return the innovation of the inputs if ``to_input``.

        Calls ``done(begin)`` when all deltas from ``begin`` on in the flat sequence are written.
        """
        layers = [each for layer in self._layers for each in layer.computed()]
        begin = self._replica.parameters.size
        for layer in reversed(layers):
            deltas = layer.backward(deltas, to_input or layer is not layers[0])
            if done is not None:
                begin = min(self._begins.get(part, begin) for part in layer.parts())
                done(begin)
        return deltas
