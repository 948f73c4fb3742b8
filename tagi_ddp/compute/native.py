"""Networks of the backend's own kernels, which are fast for small networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tagi_ddp._backend import Network
from tagi_ddp.engine.dialect import dialect
from tagi_ddp.engine.layers import ACTIVATIONS, lstm_steps
from tagi_ddp.engine.options import norm_epsilon, returns_last_step
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.engine.series import SMOOTHING
from tagi_ddp.replica import Replica

# Torch takes longer than the backend's kernels to begin a step, forward and backward: by these
# microseconds for a layer of each kind. It takes less time for a sample: by these nanoseconds for
# each use of a weight, and for each output of an activation that computes exponentials or error
# functions. Measured by `benchmarks small` on one thread of a processor with AVX-512.
_BEGIN = {"Linear": 260, "LSTM": 700, "LayerNorm": 200, "RMSNorm": 200, "Embedding": 200}
_BEGIN_ACTIVATION = 50
_WEIGHT = {"Linear": 0.03, "LSTM": 0.005}
_FAST = (*_BEGIN, "ReLU", "Sigmoid", "Tanh", "LeakyReLU")
_SLOW_OUTPUT = 35


def build(handles: Sequence[Any], replica: Replica, rows: int = 1) -> Network:
    """Return the backend's network of consecutive engine layers on the replica's parameters.

    A sample of their inputs has ``rows`` rows. Raises ValueError if there is no kernel for a layer,
    LayoutError if the memory cannot be used.
    """
    if not replica.in_place:
        raise LayoutError("the engine's memory cannot be used in place")
    unknown = {type(handle).__name__ for handle in handles} - {*_ADD, *ACTIVATIONS}
    if unknown:
        raise ValueError(f"the backend has no kernels for {', '.join(sorted(unknown))}")
    network = Network(replica.on_host, rows)
    indices = {id(layer.handle): index for index, layer in enumerate(replica.layers)}
    for handle in handles:
        kind = type(handle).__name__
        if kind == "EvenExp" and dialect().exp_covariance:
            network.add_activation("EvenExpWithCovariance")
        elif kind in ACTIVATIONS:
            network.add_activation(kind)
        else:
            _ADD[kind](network, indices[id(handle)], handle)
    return network


def limit(handles: Sequence[Any], replica: Replica) -> float:
    """Return the number of samples up to which the backend's kernels are faster than torch's.

    It depends on the engine's layers alone, so all ranks and runs choose alike.
    """
    counts = [count for _, count in replica.parameters.blocks[::2]]
    weights = {id(layer.handle): count for layer, count in zip(replica.layers, counts, strict=True)}
    begin = sample = 0.0
    outputs = 0  # of the layer before an activation
    for handle in handles:
        kind = type(handle).__name__
        uses = lstm_steps(handle) if kind == "LSTM" else 1  # of each weight by a sample
        if kind in ("Linear", "LSTM", "Embedding"):
            outputs = int(handle.output_size) * uses
        begin += _BEGIN.get(kind, _BEGIN_ACTIVATION)
        sample += _WEIGHT.get(kind, 0) * weights.get(id(handle), 0) * uses
        sample += _SLOW_OUTPUT * outputs * (kind not in _FAST)
    return begin / sample * 1e3 if sample else math.inf


def _linear(network: Network, index: int, handle: Any) -> None:
    smoothing = type(handle).__name__ in SMOOTHING
    network.add_linear(index, int(handle.output_size), int(handle.input_size), smoothing)


def _lstm(network: Network, index: int, handle: Any) -> None:
    inputs, outputs = int(handle.input_size), int(handle.output_size)
    smoothing = type(handle).__name__ in SMOOTHING
    recurrent = dialect().sequences and not smoothing
    last = recurrent and returns_last_step(handle)
    network.add_lstm(index, outputs, inputs, lstm_steps(handle), smoothing, recurrent, last)


def _layer_norm(network: Network, index: int, handle: Any) -> None:
    network.add_layer_norm(index, len(handle.mu_w), norm_epsilon(handle))


def _rms_norm(network: Network, index: int, handle: Any) -> None:
    network.add_rms_norm(index, int(handle.input_size), norm_epsilon(handle))


def _embedding(network: Network, index: int, handle: Any) -> None:
    sums = np.concatenate([handle.delta_mu_w, handle.delta_var_w]).tolist()
    inputs, size = int(handle.input_size), int(handle.embedding_dim)
    rows = dialect().sequences
    network.add_embedding(index, size, inputs, int(handle.padding_idx), sums, rows)


_ADD: dict[str, Callable[[Network, int, Any], None]] = {
    "Linear": _linear,
    "SLinear": _linear,
    "LSTM": _lstm,
    "SLSTM": _lstm,
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "Embedding": _embedding,
}
