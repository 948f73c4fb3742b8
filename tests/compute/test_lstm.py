"""LSTM layers over several batches, with their carried states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import after_series, last_step

from compute.oracle import TOLERANCE, Both, Results
from tagi_ddp.compute.lstm import LSTM
from tagi_ddp.engine.dialect import dialect


class Pair:
    """A network, computed by both, and its random batches."""

    def __init__(self, layers: list[Any], outputs: int, seed: int = 0) -> None:
        self.both = Both(*layers)
        self.outputs = outputs
        self.rng = np.random.default_rng(seed)
        parts = self.both.network._chain.parts()
        self.lstms = [layer for layer in parts if isinstance(layer, LSTM)]

    def step(self, batch: int, inputs: int, exact: bool = False, training: bool = True) -> Results:
        """Forward, backward and update, both; compare all, and the carried states."""
        rng, both = self.rng, self.both
        mean = rng.standard_normal((batch, inputs)).astype(np.float32)
        variance = None if exact else rng.uniform(0.1, 1, (batch, inputs)).astype(np.float32)
        innovation = None
        if training:
            size = batch * self.outputs
            both_parts = [rng.standard_normal(size), -rng.uniform(0.01, 1, size)]
            innovation = np.stack(both_parts).astype(np.float32)
        ours = both.torch(mean, variance, innovation)
        natively = both.natively(mean, variance, innovation)
        theirs = both.engine(mean, variance, innovation)
        for results in (ours, natively):
            if not training:  # the engine then leaves an old jacobian there
                results.arrays["outputs' jacobians"] = theirs.arrays["outputs' jacobians"]
            results.assert_close(theirs, TOLERANCE * len(self.lstms))  # each one rounds
        self.compare_states()
        if training:
            both.model.step()
        return ours

    def compare_states(self) -> None:
        theirs = self.both.model.get_lstm_states()
        for layer, index in zip(self.lstms, sorted(theirs), strict=True):
            natively = self.both.native.get_lstm_states(-1)[index]
            for own, native, other in zip(layer.get_states(), natively, theirs[index], strict=True):
                np.testing.assert_allclose(own.reshape(-1), other, rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(native, other, rtol=1e-4, atol=1e-6)

    def set_states(self, size: int) -> None:
        """Draw carried states for a single layer."""
        (layer,) = self.lstms
        means = [self.rng.standard_normal(size).astype(np.float32) for _ in range(2)]
        variances = [self.rng.uniform(0.1, 1, size).astype(np.float32) for _ in range(2)]
        states = means[0], variances[0], means[1], variances[1]
        as_lists = {0: tuple(array.tolist() for array in states)}
        self.both.model.set_lstm_states(as_lists)
        self.both.native.set_lstm_states(as_lists)
        layer.set_states(*map(torch.from_numpy, states))


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 8),
    hidden=st.integers(2, 12),
    outputs=st.integers(1, 3),
    steps=st.integers(1, 6),
    batch=st.integers(1, 8),
    depth=st.integers(1, 3),
    bias=st.booleans(),
    exact=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_lstm(
    inputs: int,
    hidden: int,
    outputs: int,
    steps: int,
    batch: int,
    depth: int,
    bias: bool,
    exact: bool,
    seed: int,
) -> None:
    import pytagi
    import pytagi.nn as nn

    pytagi.manual_seed(seed % 2**31)
    options = [*({} for _ in range(depth - 1)), last_step()]
    layers = [
        nn.LSTM(inputs if i == 0 else hidden, hidden, seq_len=steps, bias=bias, **option)
        for i, option in enumerate(options)
    ]
    head = nn.Linear(after_series(hidden, steps), outputs)
    pair = Pair([*layers, head], outputs, seed)
    for _ in range(3):
        pair.step(batch, inputs * steps, exact)


@pytest.mark.parametrize("steps", [1, 4])
def test_states_of_single_samples(steps: int) -> None:
    """One sample of one step is what the states are carried across: others carry zeros."""
    import pytagi.nn as nn

    pair = Pair(
        [
            nn.LSTM(3, 5, seq_len=steps),
            nn.LSTM(5, 4, seq_len=steps, **last_step()),
            nn.Linear(after_series(4, steps), 2),
        ],
        2,
    )
    for layer in pair.lstms:
        assert layer.get_states()[0].numel() == 0
    for _ in range(4):
        pair.step(1, 3 * steps)
    carried = any(state.any() for layer in pair.lstms for state in layer.get_states())
    assert carried == (steps == 1)
    pair.both.model.eval()
    for _ in range(3):
        pair.step(1, 3 * steps, training=False)
    pair.both.model.train()
    pair.both.model.reset_lstm_states()
    pair.both.native.reset_lstm_states()
    for layer in pair.lstms:
        layer.reset_states()
    pair.compare_states()
    pair.step(1, 3 * steps, exact=True)
    pair.step(1, 3 * steps, exact=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (1, 3), (5, 1), (4, 3)])
def test_set_states(batch: int, steps: int, exact: bool) -> None:
    import pytagi.nn as nn

    head = nn.Linear(after_series(5, steps), 2)
    pair = Pair([nn.LSTM(3, 5, seq_len=steps, **last_step()), head], 2)
    pair.step(batch, 3 * steps, exact)
    zero = pair.both.replica.arrays()[0]["mu_w"][: 5 * 8].copy()
    pair.set_states(batch * steps * 5)
    pair.compare_states()
    pair.step(batch, 3 * steps, exact)
    forget = pair.both.replica.arrays()[0]["mu_w"][: 5 * 8]
    # The forget gate has learned from them; engines with sequences begin each sample from zeros.
    used = not dialect().sequences or batch * steps == 1 or steps > 1
    assert np.array_equal(zero, forget) != used
    pair.step(batch, 3 * steps, exact)


def test_another_batch_size_forgets() -> None:
    import pytagi.nn as nn

    head = nn.Linear(after_series(5, 2), 2)
    pair = Pair([nn.LSTM(3, 5, seq_len=2, **last_step()), head], 2)
    pair.set_states(4 * 2 * 5)  # before the first batch: in vain
    for batch in (4, 3):  # the engine writes beyond its buffers when batches grow
        pair.step(batch, 6)
        pair.set_states(batch * 2 * 5)
        pair.step(batch, 6)
    with pytest.raises(ValueError, match=r"mu_h has 7 elements; give 3 \* 10"):
        pair.lstms[0].set_states(*torch.zeros(4, 7))
    with pytest.raises(ValueError, match=r"mu_h has 7 elements; give 3 \* 10"):
        pair.both.native.set_lstm_states({0: np.zeros((4, 7)).tolist()})


def test_activation_below_is_ignored() -> None:
    import pytagi.nn as nn

    below = nn.LSTM(4, 3, seq_len=2) if last_step() else nn.Linear(8, 6)
    above = nn.Linear(after_series(5, 2), 1)
    layers = [below, nn.Sigmoid(), nn.LSTM(3, 5, seq_len=2, **last_step()), nn.Tanh(), above]
    pair = Pair(layers, 1)
    pair.step(4, 8)
    pair.step(4, 8)
