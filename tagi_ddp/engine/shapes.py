"""The shape of a sample in each layer of a network, which engines see in two ways.

In some each sample is one row of numbers. In others it may have several rows, such as the steps of
a series or the words of a text, and most layers see each row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tagi_ddp.engine.dialect import dialect, learns_from_all_steps, passes_steps_on, softmax_works
from tagi_ddp.engine.layers import ACTIVATIONS, Layer, input_size_of, lstm_steps, walk
from tagi_ddp.engine.options import returns_last_step

_ACTIVATIONS = (*ACTIVATIONS, "Softplus")
_TAKE_VECTORS = ("Linear", "LSTM", "SLinear", "LayerNorm", "RMSNorm")
_SEE_ALL_STEPS = ("LSTM", "Embedding")
# The cap factor of these layers counts samples, that of all others the rows that they see.
_CAPPED_BY_SAMPLES = ("LSTM", "SLSTM", "SLinear", "Embedding", "MultiheadAttention")


@dataclass(frozen=True)
class Shape:
    """The shape of a sample in a layer: ``rows``, each of which it sees alone, and its outputs."""

    rows: int
    out_rows: int
    width: int

    @property
    def outputs(self) -> int:
        """The number of outputs of a sample."""
        return self.out_rows * self.width


def input_rows(model: Any) -> int:
    """Return the rows of a sample of the inputs: the steps of a series in engines that see them."""
    if dialect().sequences:
        for layer in walk(model):
            if layer.kind == "Embedding":
                return 1
            if layer.kind == "LSTM":
                return lstm_steps(layer.handle)
    return 1


def shapes(model: Any) -> Iterator[tuple[Layer, Shape]]:
    """Yield each layer of `walk` with the shape of a sample in it."""
    sequences, rows, width = dialect().sequences, input_rows(model), 0
    for layer in walk(model):
        handle, before = layer.handle, rows
        if layer.kind in ("LSTM", "SLSTM"):
            steps = lstm_steps(handle)
            width = int(handle.output_size) * (1 if sequences else steps)
            if sequences and layer.kind == "LSTM" and returns_last_step(handle):
                rows = 1
        elif layer.kind == "Embedding":
            width = int(handle.embedding_dim) * (1 if sequences else int(handle.input_size))
            rows = int(handle.input_size) if sequences else 1
        else:  # A layer without a size of its own keeps that of the layer before.
            width = int(handle.output_size) or width
        yield layer, Shape(before, rows, width)


def last_layer(model: Any) -> tuple[Layer, Shape]:
    """Return the layer that has a network's outputs, and the shape of a sample in it."""
    *_, last = shapes(model)
    return last


def learns_noise(model: Any) -> bool:
    """Return whether every second output is the variance of the noise of the one before."""
    return last_layer(model)[0].kind == "EvenExp"


def cap_rows(layer: Layer, shape: Shape) -> int:
    """Return the rows of a sample that count for a layer's cap factor; 0: the factor is 1."""
    if layer.kind == "RMSNorm" and dialect().free_rms_norm:
        return 0
    return 1 if layer.kind in _CAPPED_BY_SAMPLES else shape.rows


def require_steps(model: Any) -> None:
    """Raise ValueError for a layer that, in engines with sequences, uses memory of others.

    It takes the steps of a series at once, where it gets one after another; or it loses their
    number; or it is a Softmax.
    """
    if not dialect().sequences:
        return
    width, all_shapes = 0, list(shapes(model))
    change = len({rows for _, shape in all_shapes for rows in (shape.rows, shape.out_rows)}) > 1
    for layer, shape in all_shapes:
        if layer.kind == "Softmax" and not softmax_works():
            raise ValueError(
                f"layer {layer.name}: this engine's Softmax writes to memory of others. Take "
                "ClosedFormSoftmax or Remax"
            )
        if change and layer.kind in _ACTIVATIONS and not passes_steps_on(layer.kind):
            raise ValueError(
                f"layer {layer.name}: this engine's {layer.kind} does not pass on how many steps a "
                "sample has, which changes in this network. Take ReLU, Sigmoid or Tanh"
            )
        if layer.kind == "SLSTM" and lstm_steps(layer.handle) > 1:
            raise ValueError(f"layer {layer.name}: in this engine SLSTM needs seq_len=1")
        sees_all = layer.kind in (*_SEE_ALL_STEPS, *_ACTIVATIONS)
        if shape.rows > 1 and not sees_all and not learns_from_all_steps():
            raise ValueError(
                f"layer {layer.name} gets {shape.rows} steps of a sample, of which this engine's "
                "backward pass sees the first ones only. Give the LSTM before it "
                "last_timestep=True"
            )
        takes = int(layer.handle.input_size)
        if layer.kind in _TAKE_VECTORS and takes and width and takes != width:
            raise ValueError(
                f"layer {layer.name}: a layer takes {takes} inputs, but the one before has {width} "
                "outputs; in this engine layers see the steps of a sample one at a time"
            )
        width = shape.width


def swaps_in_samples(model: Any) -> bool:
    """Return whether an EvenExp layer of the model has an odd number of outputs.

    The engine counts elements through the whole batch, so it swaps the roles of the outputs in
    every other sample.
    """
    return any(layer.kind == "EvenExp" and shape.outputs % 2 for layer, shape in shapes(model))


def sample_shape(model: Any) -> tuple[int, ...]:
    """Return the shape of a sample of a model's inputs, according to its first layer.

    It is (channels, height, width) for images, (steps, inputs) for series, else (inputs,).
    """
    first = next(walk(model))
    handle, steps = first.handle, input_rows(model)
    if first.kind in ("Conv2d", "ConvTranspose2d"):
        inputs: tuple[int, ...] = (
            int(handle.in_channels),
            int(handle.in_height),
            int(handle.in_width),
        )
    else:
        inputs = (input_size_of(handle),)
        if first.kind in ("LSTM", "SLSTM"):
            steps = lstm_steps(handle)
    return inputs if steps == 1 else (steps, *inputs)
