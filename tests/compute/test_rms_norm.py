"""RMSNorm, which the wheel of the engine lacks: then only the kernels are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.oracle import compare
from tagi_ddp._backend import Network, Parameters


def require_rms_norm() -> None:
    import cutagi

    if not hasattr(cutagi, "RMSNorm"):
        pytest.skip("this engine has no RMSNorm")


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 12),
    batch=st.integers(1, 9),
    exact=st.booleans(),
    first=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_as_the_engine(size: int, batch: int, exact: bool, first: bool, seed: int) -> None:
    require_rms_norm()
    import pytagi.nn as nn

    def layers() -> list[Any]:
        below = [] if first else [nn.Linear(5, size), nn.ReLU()]
        return [*below, nn.RMSNorm([size]), nn.Linear(size, 2)]

    compare(layers, size if first else 5, batch, seed, exact and not first)


@given(size=st.integers(1, 9), batch=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_the_formulas(size: int, batch: int, seed: int) -> None:
    """Of the engine, written in another way."""
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=size), rng.uniform(0.1, 1, size), np.zeros(size), np.zeros(size)]
    mu, var, delta_mu, delta_var = (array.astype(np.float32) for array in weights)
    none = [np.zeros(0, np.float32) for _ in range(4)]
    table = Parameters()
    table.add_layer("norm", [mu, var, delta_mu, delta_var], none, np.zeros(1, np.int32))
    network = Network(table)
    network.add_rms_norm(0, size, 1e-3)
    mean = rng.normal(size=(batch, size)).astype(np.float32)
    variance = rng.uniform(0.1, 1, (batch, size)).astype(np.float32)
    outputs = np.empty((2, batch * size), np.float32)
    network.forward(mean, variance, None, True, *outputs)
    root = np.sqrt((mean**2).mean(1, keepdims=True) + 1e-3)
    # The first factor is one too many; see tagi_ddp/compute/rms_norm.py.
    spread = variance * (variance * (mu**2 + var) + var * mean**2) / root**2
    np.testing.assert_allclose(outputs[0].reshape(batch, size), mu * mean / root, rtol=1e-4)
    np.testing.assert_allclose(outputs[1].reshape(batch, size), spread, rtol=1e-4)
    change = rng.normal(size=(2, batch, size)).astype(np.float32)
    network.set_innovation(change[0].ravel(), change[1].ravel())
    network.backward(True)
    np.testing.assert_allclose(delta_mu, (change[0] * mean / root).sum(0), rtol=1e-3, atol=1e-5)
    squares = (mean / root) ** 2
    np.testing.assert_allclose(delta_var, (change[1] * squares).sum(0), rtol=1e-3, atol=1e-5)
    below = np.empty((2, batch * size), np.float32)
    network.read_input_innovation(*below)
    np.testing.assert_allclose(below[0].reshape(batch, size), change[0] * mu / root, rtol=1e-4)
    slope = (mu / root) ** 2
    np.testing.assert_allclose(below[1].reshape(batch, size), change[1] * slope, rtol=1e-4)
