"""The comparison of the backend's kernels with the engine that is there, kind by kind.

Upstream mends formulas under the same version number. Where the engine computes a layer by another
one, the kernels would train another network, so the engine keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tagi_ddp.compute import native
from tagi_ddp.engine.dialect import dialect, make_layer, softmax_works
from tagi_ddp.engine.layers import ACTIVATIONS, DELTAS, PARAMETERS, walk
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.engine.shapes import input_rows
from tagi_ddp.replica.host import InPlace

# The engine's LeakyReLU leaves its output unchanged; the kernels follow its documentation.
_BEYOND = {"LeakyReLU"}
_BATCH = 4
_TOLERANCE = 1e-3  # of the largest number of an array


def other_formulas(model: Any) -> list[str]:
    """Return the kinds of the model's layers that the engine computes otherwise than the kernels.

    Of the kinds that torch alone computes, images, none is compared.
    """
    kinds = {layer.kind for layer in walk(model)} & {*_RECIPES, *ACTIVATIONS} - _BEYOND
    return sorted(kind for kind in kinds if not _agrees(kind))


def all_other_formulas() -> list[str]:
    """Return all kinds of layers of this engine that the kernels compute otherwise."""
    load_engine()
    import cutagi

    kinds = {kind for kind in (*_RECIPES, *ACTIVATIONS) if hasattr(cutagi, kind)} - _BEYOND
    if not softmax_works():
        kinds -= {"Softmax"}  # The comparison would not be safe.
    return sorted(kind for kind in kinds if not _agrees(kind))


@functools.cache
def _agrees(kind: str) -> bool:
    """Compare outputs and deltas of a small network, once in a process."""
    load_engine()
    import cutagi

    layers = _RECIPES.get(kind, functools.partial(_with_activation, kind))(cutagi)
    engine = cutagi.Sequential(layers)
    engine.set_threads(1)
    engine.num_samples = 3  # of the series of smoothing layers
    model = SimpleNamespace(_cpp_backend=engine)
    replica = InPlace(model)
    rows = input_rows(model)
    network = native.build(layers, replica, rows)
    network.set_samples(3)
    batch = 1 if kind in ("SLSTM", "SLinear") else _BATCH
    count = batch * network.input_size
    mean = _numbers(count) if kind != "Embedding" else np.arange(count, dtype=np.float32) % 3
    variance = 0.2 + 0.1 * _numbers(count)
    outputs = np.empty((2, batch * network.output_size), np.float32)
    innovation = _numbers(outputs.shape[1]), -0.1 - 0.05 * np.abs(_numbers(outputs.shape[1]))

    network.forward(mean, variance, None, True, *outputs)
    network.set_innovation(*innovation)
    network.backward(False)
    # The engine writes the deltas of all gates of such an LSTM to one place.
    first = replica.parameters.blocks[2][0] if "LSTM" in kind or kind == "SLinear" else 0
    ours = [*outputs, _deltas(replica)[first:]]
    if kind == "Embedding":  # The engine adds to its deltas.
        layers[0].delta_mu_w = layers[0].delta_var_w = [0.0] * 6
    shape = (batch, rows, -1) if rows > 1 else (batch, -1)
    engine.forward(mean.reshape(shape), variance.reshape(shape))
    states, size = engine.output_z_buffer, outputs.shape[1]
    theirs = [np.array(states.mu_a[:size]), np.array(states.var_a[:size])]
    room = np.zeros((2, engine.input_delta_z_buffer.size), np.float32)
    room[:, :size] = innovation
    engine.set_delta_z(*room)
    engine.backward()
    theirs.append(_deltas(replica)[first:])
    return all(
        np.abs(own - other).max() <= _TOLERANCE * np.abs(other).max()
        for own, other in zip(ours, theirs, strict=True)
    )


def _numbers(count: int) -> Any:
    return np.sin(np.arange(1, count + 1), dtype=np.float32)


def _deltas(replica: InPlace) -> Any:
    replica.pull()
    deltas = np.empty(2 * replica.parameters.size, np.float32)
    replica.parameters.pack(deltas)
    return deltas.reshape(2, -1).T


def _filled(layer: Any, inputs: int, outputs: int, weights: int, biases: int) -> Any:
    """Return a layer with these sizes and with parameters that differ."""
    make_layer(layer, inputs, outputs, weights, biases)
    for part, count in (("w", weights), ("b", biases)):
        setattr(layer, f"mu_{part}", (0.5 * _numbers(count)).tolist())
        setattr(layer, f"var_{part}", (0.2 + 0.1 * _numbers(count)).tolist())
    return layer


def _gates(lstm: Any, inputs: int, outputs: int) -> Any:
    """Return an LSTM whose gates have equal weights: without a draw the engine uses one for all."""
    _filled(lstm, inputs, outputs, outputs * (inputs + outputs), outputs)
    for name in (*PARAMETERS, *DELTAS):
        setattr(lstm, name, 4 * list(getattr(lstm, name)))
    lstm.num_weights, lstm.num_biases = 4 * lstm.num_weights, 4 * lstm.num_biases
    return lstm


def _linear(cutagi: Any, inputs: int, outputs: int) -> Any:
    return _filled(cutagi.Linear(0, 0, True), inputs, outputs, inputs * outputs, outputs)


def _with_activation(kind: str, cutagi: Any) -> list[Any]:
    return [_linear(cutagi, 3, 4), getattr(cutagi, kind)(), _linear(cutagi, 4, 2)]


def _with_norm(kind: str, cutagi: Any) -> list[Any]:
    norm = getattr(cutagi, kind)([4], 1e-3)
    _filled(norm, 4, 4, 4, len(norm.mu_b))
    return [_linear(cutagi, 3, 4), norm, _linear(cutagi, 4, 2)]


def _lstm(cutagi: Any) -> list[Any]:
    sequences = dialect().sequences
    options = {"last_timestep": True} if sequences else {}
    lstm = cutagi.LSTM(0, 0, seq_len=2, bias=True, **options)
    return [_gates(lstm, 2, 2), _linear(cutagi, 2 if sequences else 4, 1)]


def _series(cutagi: Any) -> list[Any]:
    lstm = _gates(cutagi.SLSTM(0, 0, seq_len=1, bias=True), 1, 2)
    return [lstm, _filled(cutagi.SLinear(0, 0, True), 2, 1, 2, 1)]


def _embedding(cutagi: Any) -> list[Any]:
    embedding = cutagi.Embedding(3, 2, 2, 1.0, -1, 0)
    embedding.mu_w, embedding.var_w = (0.5 * _numbers(6)).tolist(), [0.2] * 6
    return [embedding] if dialect().sequences else [embedding, _linear(cutagi, 4, 1)]


_RECIPES: dict[str, Callable[[Any], list[Any]]] = {
    "Linear": lambda cutagi: [_linear(cutagi, 3, 2)],
    "LayerNorm": functools.partial(_with_norm, "LayerNorm"),
    "RMSNorm": functools.partial(_with_norm, "RMSNorm"),
    "LSTM": _lstm,
    "SLSTM": _series,
    "SLinear": _series,
    "Embedding": _embedding,
}
