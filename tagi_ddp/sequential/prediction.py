"""Predictions of any number of samples, with the noise of their observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp.checks import flat_floats, require_rows, shape_of
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.shapes import last_layer, learns_noise, sample_shape

# Samples of a forward pass. Even: an EvenExp layer of an odd width counts through the whole batch.
_CHUNK = 256

Forward = Callable[[FloatArray], tuple[Any, Any]]


def predict(
    network: Any, forward: Forward, x: ArrayLike, noise: ArrayLike | None
) -> tuple[FloatArray, FloatArray]:
    """Predict by ``forward``, in the present mode; see `LearnInterface.predict`."""
    flat = flat_floats("x", x, False)
    outputs, noisy = last_layer(network)[1].outputs, learns_noise(network)
    if noisy and outputs % 2:
        raise ValueError(
            f"the network ends in EvenExp, which makes pairs of a value and its noise, but has "
            f"{outputs} outputs: give it an even number"
        )
    sample = sample_shape(network)
    require_rows("x", shape_of(x), sample)
    rows, left = divmod(len(flat), width := math.prod(sample))
    if left:
        raise ValueError(f"x has {len(flat)} numbers: give [samples, {width}], or as many in a row")
    added = None if noise is None else _checked(noise, rows, outputs // (1 + noisy))
    mean, variance = np.empty((2, rows, outputs), np.float32)
    # A last chunk of one sample would be the next step of a series to LSTM layers.
    for begin in range(0, rows - (rows > 1), _CHUNK):
        end = rows if rows - begin <= _CHUNK + 1 else begin + _CHUNK
        found = forward(flat[begin * width : end * width])
        mean[begin:end], variance[begin:end] = (part.reshape(-1, outputs) for part in found)
    if noisy:
        added = mean[:, 1::2] if added is None else added
        mean, variance = mean[:, ::2].copy(), variance[:, ::2].copy()
    if added is not None:
        variance += added
    return mean, variance


def _checked(noise: ArrayLike, rows: int, outputs: int) -> FloatArray:
    """Return variances that can be added to those of [rows, outputs]."""
    flat: FloatArray = flat_floats("noise", noise, False)
    wrong = flat[~((flat >= 0) & (flat < np.inf))]
    if len(wrong):
        raise ValueError(f"noise is a variance, finite and at least 0, got {wrong[0]:g}")
    shape = np.shape(noise)
    if len(flat) in (1, outputs) and len(shape) < 2:
        return flat
    if len(flat) == rows * outputs and (len(shape) < 2 or shape == (rows, outputs)):
        return flat.reshape(rows, outputs)
    raise ValueError(
        f"noise has shape {shape}: give one number, one for each of the {outputs} outputs, or an "
        f"array of [{rows}, {outputs}]"
    )
