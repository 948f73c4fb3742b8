"""Activations: on the input, between linear layers, on the output, one upon another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import require_activation

from compute.oracle import Both, compare
from tagi_ddp.compute.states import Deltas

# LeakyReLU has a test of its own: the engine's writes nothing.
ELEMENTWISE = [
    "ReLU",
    "Sigmoid",
    "Tanh",
    "MixtureReLU",
    "MixtureSigmoid",
    "MixtureTanh",
    "MixtureSoftplus",
    "EvenExp",
]
OVER_OUTPUTS = ["Softmax", "Remax", "ClosedFormSoftmax"]


def activation(kind: str, inputs: int) -> Any:
    """Return the layer, also where it is the network's first, which the engine must be told."""
    import cutagi

    handle = getattr(cutagi, kind)()
    handle.input_size = handle.output_size = inputs
    return type(kind, (), {"_cpp_backend": handle})()


@pytest.mark.parametrize("kind", ELEMENTWISE + OVER_OUTPUTS)
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(4, 30),
    batch=st.integers(8, 20),
    above=st.booleans(),
    below=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_activation(kind: str, size: int, batch: int, above: bool, below: bool, seed: int) -> None:
    require_activation(kind)

    def layers() -> list[Any]:
        import pytagi.nn as nn

        return [
            *([nn.Linear(6, size)] if below else []),
            activation(kind, size),
            *([nn.Linear(size, 3)] if above else []),
        ]

    compare(layers, 6 if below else size, batch, seed)


@pytest.mark.parametrize("first", ["Sigmoid", "MixtureReLU"])  # exact zeros would give NaN
@pytest.mark.parametrize("second", ELEMENTWISE)
def test_one_upon_another(first: str, second: str) -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        return [nn.Linear(6, 11), activation(first, 11), activation(second, 11), nn.Linear(11, 2)]

    compare(layers, 6, 9)


@pytest.mark.parametrize("kind", ELEMENTWISE + OVER_OUTPUTS)
def test_exact_input(kind: str) -> None:
    require_activation(kind)
    rng = np.random.default_rng(0)
    both = Both(activation(kind, 7))
    mean = rng.standard_normal((5, 7)).astype(np.float32)
    mean[0, 0] = 0  # 0 / 0 in the mixtures
    ours, theirs = both.torch(mean, None, None), both.engine(mean, None, None)
    for name, array in ours.arrays.items():
        np.testing.assert_allclose(array, theirs.arrays[name], rtol=1e-5, atol=1e-7, err_msg=name)


@given(shape=st.tuples(st.integers(1, 9), st.integers(1, 9)), seed=st.integers(0, 2**31))
def test_leaky_relu(shape: tuple[int, int], seed: int) -> None:
    # The engine's own passes its arguments in another order than they are taken in, so that its
    # loop runs over nothing and the output is what the buffer held before: no oracle.
    rng = np.random.default_rng(seed)
    mean = rng.standard_normal(shape).astype(np.float32)
    variance = rng.uniform(0.1, 1, shape).astype(np.float32)
    network = Both(activation("LeakyReLU", shape[1])).network
    states = network.forward(torch.from_numpy(mean), torch.from_numpy(variance), training=True)
    slope = np.where(mean > 0, 1, 0.1).astype(np.float32)
    assert states.variance is not None
    assert states.jacobian is not None
    innovation = Deltas(torch.from_numpy(mean.copy()), torch.from_numpy(variance.copy()))
    scaled = states.jacobian.scale(innovation)
    for ours, formula in [
        (states.mean, mean * slope),
        (states.variance, variance * slope**2),
        (states.jacobian.tensor(), slope),
        (scaled.mean, mean * slope),
        (scaled.variance, variance * slope**2),
    ]:
        np.testing.assert_allclose(ours.numpy(), formula, rtol=1e-6)
