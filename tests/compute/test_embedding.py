"""Embedding layers over several steps: their deltas add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import after_series, after_words

from compute.oracle import Both
from tagi_ddp.compute import native
from tagi_ddp.compute.network import Network
from tagi_ddp.compute.states import Deltas


def step(both: Both, indices: np.ndarray, outputs: int, rng: np.random.Generator) -> None:
    """Forward, backward and update, both; compare."""
    size = len(indices) * outputs
    innovation = np.stack([rng.standard_normal(size), -rng.uniform(0.01, 1, size)])
    innovation = innovation.astype(np.float32)
    ours = both.torch(indices, None, innovation)
    natively = both.natively(indices, None, innovation)
    both.deltas.fill_(7)  # as an exchange with other replicas would
    theirs = both.engine(indices, None, innovation)
    ours.assert_close(theirs)
    natively.assert_close(theirs)
    both.model.step()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12),
    size=st.integers(1, 6),
    inputs=st.integers(1, 5),
    batch=st.integers(1, 9),
    padding=st.integers(-1, 11),
    seed=st.integers(0, 2**31),
)
def test_embedding(count: int, size: int, inputs: int, batch: int, padding: int, seed: int) -> None:
    import pytagi
    import pytagi.nn as nn

    pytagi.manual_seed(seed % 2**31)
    rng = np.random.default_rng(seed)
    both = Both(
        nn.Embedding(count, size, inputs, 0.5, padding),
        *after_words(size, inputs),
        nn.Linear(after_series(size, inputs), 2),
    )
    # The engine draws these regardless of its seed.
    both.model.layers[0].mu_w = rng.standard_normal(count * size).tolist()
    both.network.bind()
    # An index outside of the table is read there by the engine, but for the padding's own.
    known = [*range(count), padding]
    for _ in range(3):
        indices = rng.choice(known, (batch, inputs)).astype(np.float32)
        step(both, indices, 2, rng)


def test_alone_with_fractions() -> None:
    import pytagi.nn as nn

    both = Both(nn.Embedding(5, 3, 2))
    indices = np.array([[0.9, 4.2], [3.99, -0.5]], np.float32)  # the engine cuts them off
    step(both, indices, 6, np.random.default_rng(0))


def test_goes_on_from_the_engines_deltas() -> None:
    import pytagi.nn as nn

    rng = np.random.default_rng(0)
    both = Both(nn.Embedding(5, 3, 2), *after_words(3, 2), nn.Linear(after_series(3, 2), 2))
    indices = rng.integers(0, 5, (4, 2)).astype(np.float32)
    innovation = np.stack([rng.standard_normal(8), -np.ones(8)]).astype(np.float32)
    both.engine(indices, None, innovation)
    both.network = Network(both.model, both.replica, both.deltas)
    both.native = native.build(both.model._cpp_backend.layers, both.replica)
    step(both, indices, 2, rng)


def test_index_outside_is_an_error() -> None:
    import pytagi.nn as nn

    both = Both(nn.Embedding(5, 3, 2))
    for index in (5, -2):
        with pytest.raises(IndexError):
            both.network.forward(torch.tensor([[0.0, index]]), None, training=False)
        outputs = np.empty((2, 6), np.float32)
        inputs = np.array([0, index], np.float32)
        with pytest.raises(IndexError, match=f"index {index}, but the rows go from 0 to 4"):
            both.native.forward(inputs, None, None, False, *outputs)


def test_indices_have_no_innovation() -> None:
    import pytagi.nn as nn

    network = Both(nn.Embedding(5, 3, 2)).network
    network.forward(torch.zeros(4, 2), None, training=True)
    below = network._chain.backward(Deltas(torch.ones(4, 6), torch.ones(4, 6)), True)
    assert below.mean.shape == below.variance.shape == (4, 2)
    assert not below.mean.any()
