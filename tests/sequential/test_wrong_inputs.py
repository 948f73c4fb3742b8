"""Inputs, observations and variances that are surely wrong are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytagi
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytagi.nn import (
    LSTM,
    SLSTM,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    EvenExp,
    LayerBlock,
    LayerNorm,
    Linear,
    OutputUpdater,
    ReLU,
    Sequential,
    SLinear,
)
from support.networks import after_series, after_words, last_step

import tagi_ddp
from tagi_ddp import DDPSequential, MapError, accelerate, map_networks
from tagi_ddp.checks import require_rows, require_variances

COMPUTES = pytest.mark.parametrize("compute", ["engine", "native", "torch", "auto"])
BATCH, OUTPUTS = 4, 6
NAN, INF = math.nan, math.inf
WRONG = pytest.mark.parametrize("wrong", [-0.3, -1e-30, NAN, INF, -INF])


def image(kind: Any) -> Any:
    return kind(3, 2, 1, in_width=4, in_height=4)


# First layers: who computes them, shapes of two samples, and shapes that are none.
FIRST: dict[str, tuple[Any, Callable[[], list[Any]], list[tuple[int, ...]], Any]] = {
    "linear": ("auto", lambda: [Linear(8, 2)], [(2, 8), (2, 1, 8), (2, 2, 4)], [(8, 2), (2, 7)]),
    "image": (
        "torch",
        lambda: [image(Conv2d), ReLU(), Linear(32, 2)],
        [(2, 3, 4, 4), (2, 48), (2, 3, 16), (2, 1, 3, 4, 4)],
        [(2, 4, 4, 3), (2, 3, 5, 4), (48, 2), (3, 2, 4, 4), (2, 49)],
    ),
    "enlarging": (
        "torch",
        lambda: [image(ConvTranspose2d), ReLU(), Linear(32, 2)],
        [(2, 3, 4, 4), (2, 48)],
        [(2, 4, 4, 3), (2, 3, 8, 4)],
    ),
    "series": (
        "auto",
        lambda: [LSTM(2, 4, seq_len=3, **last_step()), Linear(after_series(4, 3), 2)],
        [(2, 3, 2), (2, 6), (6, 2)],
        [(3, 2, 2), (2, 2, 3), (6, 2, 1), (12, 1), (2, 5)],
    ),
    "smoothed": (
        "native",
        lambda: [SLSTM(2, 4, seq_len=1), SLinear(4, 1)],
        [(2, 2), (2, 1, 2)],
        [(4, 1), (1, 4), (2, 3)],
    ),
    "embedding": (
        "auto",
        lambda: [Embedding(5, 3, 6), *after_words(3, 6), Linear(after_series(3, 6), 2)],
        [(2, 6)],
        [(6, 2), (12, 1)],
    ),
    "normalized": ("auto", lambda: [LayerNorm([6]), Linear(6, 2)], [(2, 6)], [(6, 2), (3, 4)]),
    "block": (
        "torch",
        lambda: [LayerBlock(Linear(6, 3), ReLU(), Linear(3, 4)), Linear(4, 2)],
        [(2, 6)],
        [(6, 2), (3, 4)],
    ),
}


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, np.ndarray.tolist])
@pytest.mark.parametrize("name", FIRST)
def test_rows_are_samples_of_the_first_layer(name: str, kind: Any) -> None:
    compute, layers, right, wrong = FIRST[name]
    model = accelerate(Sequential(*layers()), compute)
    model.num_samples = 100  # steps of a series that is smoothed
    size = math.prod(right[0])
    flat = np.arange(size, dtype=np.float32) % 5
    expected = model(flat)
    for shape in right:
        model.reset_lstm_states()
        np.testing.assert_allclose(model(kind(flat.reshape(shape))), expected, rtol=1e-5)
    before = model.check_replicas()
    for shape in wrong:
        given = kind(np.zeros(shape, np.float32))
        text = rf"mu_x has the shape \({shape[0]}, .* takes samples of {size // 2} numbers"
        for call in (model, lambda x: model.learn(x, flat, 0.1), model.forward):
            with pytest.raises(ValueError, match=text):
                call(given)
        with pytest.raises(ValueError, match="var_x has the shape"):
            model(flat, given)
    assert model.check_replicas() == before


@given(
    sample=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    batch=st.integers(0, 7),
    shape=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    data=st.data(),
)
def test_any_rows(sample: list[int], batch: int, shape: list[int], data: Any) -> None:
    """A batch of samples passes, also with dimensions joined; rows that make no sample do not."""
    require_rows("x", (batch, *sample), sample)
    require_rows("x", (batch * math.prod(sample),), sample)
    cut = data.draw(st.integers(0, len(sample) - 1))
    require_rows("x", (batch, *sample[:cut], math.prod(sample[cut:])), sample)
    products = {math.prod(shape[k:]) for k in range(len(shape))}
    steps = len(sample) == len(shape) == 2 and shape[1] == sample[1]
    if math.prod(sample) not in products and not steps:
        with pytest.raises(ValueError, match="x has the shape"):
            require_rows("x", tuple(shape), sample)


@COMPUTES
def test_after_a_first_step_rows_are_looked_at_as_before(compute: Any) -> None:
    """The shortest way of a step knows shapes, not sizes."""
    model = accelerate(Sequential(Linear(8, 4), ReLU(), Linear(4, 2)), compute)
    x, y = np.ones((12, 8), np.float32), np.ones((12, 2), np.float32)
    for _ in range(2):
        model.learn(x, y, 0.1)
    before = model.check_replicas()
    for wrong in ((x.T.copy(), y), (x.reshape(24, 4), y), (x, y.T.copy())):
        with pytest.raises(ValueError, match=r"mu_\w+( \(y\))? has the shape"):
            model.learn(*wrong, 0.1)
    with pytest.raises(ValueError, match=r"var_x has the shape \(8, 12\)"):
        model.learn(x, y, 0.1, var_x=x.T.copy())
    assert model.check_replicas() == before


def test_networks_of_a_map_refuse_the_same() -> None:
    def train(x: Any) -> float:
        return float(accelerate(Sequential(Linear(8, 1)))(x)[0].sum())

    with pytest.raises(MapError, match=r"mu_x has the shape \(8, 3\)") as failed:
        map_networks(train, [np.ones((3, 8)), np.ones((8, 3))])
    assert sorted(failed.value.errors) == [1]


# --- variances ------------------------------------------------------------------------------------


def network(compute: Any) -> DDPSequential:
    pytagi.manual_seed(7)
    return accelerate(Sequential(Linear(3, 5), ReLU(), Linear(5, OUTPUTS)), compute)


X = np.linspace(-1, 1, BATCH * 3, dtype=np.float32).reshape(BATCH, 3)
Y = np.linspace(-1, 1, BATCH * OUTPUTS, dtype=np.float32)
ALL = np.tile(np.arange(1, OUTPUTS + 1, dtype=np.int32), BATCH)


def by_pytagis_updater(model: Any, y: Any, noise: Any, *picks: Any) -> None:
    model(X)
    method = "update_using_indices" if picks else "update"
    buffers = model.output_z_buffer, model.input_delta_z_buffer
    getattr(OutputUpdater("cpu"), method)(buffers[0], y, noise, *picks, buffers[1])
    model.backward()
    model.step()


def by_our_updater(model: Any, y: Any, noise: Any, *picks: Any) -> None:
    model(X)
    updater = tagi_ddp.OutputUpdater(model)
    (updater.update_using_indices if picks else updater.update)(y, noise, *picks)
    model.backward()
    model.step()


WAYS: dict[str, Callable[[Any, Any, Any], object]] = {
    "learn": lambda model, y, noise: model.learn(X, y, noise),
    "learn tensors": lambda model, y, noise: model.learn(
        X, torch.from_numpy(y), torch.from_numpy(noise).double()
    ),
    "learn chosen": lambda model, y, noise: model.learn(X, y, noise, ALL),
    "pytagi's": by_pytagis_updater,
    "pytagi's chosen": lambda model, y, noise: by_pytagis_updater(model, y, noise, ALL),
    "ours": by_our_updater,
    "ours chosen": lambda model, y, noise: by_our_updater(model, y, noise, ALL),
}


@WRONG
@COMPUTES
def test_variances_of_noise(compute: Any, wrong: float) -> None:
    """At first and after a step; that of a missing observation may be anything."""
    model, noise = network(compute), np.full(Y.size, 0.1, np.float32)
    for _ in range(2):
        before = model.check_replicas()
        for index, (name, way) in enumerate(WAYS.items()):
            bad, missing = noise.copy(), Y.copy()
            bad[index + 9] = wrong
            with pytest.raises(ValueError, match=rf"var_obs.* is {wrong:g} at element {index + 9}"):
                way(model, Y, bad)
            assert model.check_replicas() == before, name
        with pytest.raises(ValueError, match=rf"var_obs \(noise\) is {wrong:g}: the variance of"):
            model.learn(X, Y, wrong)
        missing[index + 9] = NAN
        way(model, missing, bad)
        assert model.check_replicas() != before


@WRONG
@COMPUTES
def test_variances_of_inputs(compute: Any, wrong: float) -> None:
    model, spread = network(compute), np.full(X.shape, 0.1, np.float32)
    model.learn(X, Y, 0.1, var_x=spread)
    before = model.check_replicas()
    spread[2, 1] = wrong
    for kind in (np.asarray, torch.from_numpy):
        for call in (
            lambda bad: model(X, bad),
            lambda bad: model.learn(X, Y, 0.1, var_x=bad),
        ):
            with pytest.raises(ValueError, match=rf"var_x is {wrong:g} at element 7"):
                call(kind(spread))
    assert model.check_replicas() == before


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    missing=st.sets(st.integers(0, 39)),
)
def test_any_variances(values: list[float], missing: set[int]) -> None:
    variances = np.array(values, np.float32)
    means = np.zeros(len(values), np.float32)
    means[[index for index in missing if index < len(values)]] = NAN
    right = [0 <= value < INF or index in missing for index, value in enumerate(values)]
    for kind in (np.asarray, torch.from_numpy):
        if all(right):
            require_variances("noise", kind(variances), kind(means))
        else:
            with pytest.raises(ValueError, match=rf"noise is .* at element {right.index(False)}:"):
                require_variances("noise", kind(variances), kind(means))


# --- the arguments of learn -----------------------------------------------------------------------


@COMPUTES
def test_other_names_of_arguments(compute: Any) -> None:
    hashes = []
    for names in (("mu_x", "mu_obs", "var_obs"), ("x", "y", "noise"), ("x", "mu_obs", "noise")):
        model = network(compute)
        model.learn(**dict(zip(names, (X, Y, 0.1), strict=True)))
        hashes.append(model.check_replicas())
    assert len(set(hashes)) == 1
    for arguments, text in (
        ({"mu_x": X, "x": X, "y": Y}, "both mu_x and x, which are the same: give one"),
        ({"x": X, "y": Y, "mu_obs": Y}, "both mu_obs and y"),
        ({"x": X, "y": Y, "var_obs": 0.1, "noise": 0.1}, "both var_obs and noise"),
        ({"x": X, "noise": 0.1}, "needs mu_obs, or y by name"),
        ({"mu_obs": Y, "noise": 0.1}, "needs mu_x, or x by name"),
    ):
        with pytest.raises(TypeError, match=rf"learn\(\) .*{text}"):
            model.learn(**arguments)  # type: ignore[arg-type]


@COMPUTES
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((np.arange(BATCH), 0.1), r"\(y\) has 4 elements, but .* \[4, 6\].*numpy.eye\(6\)\[l"),
        ((np.arange(BATCH), 0.1), r"hierarchical softmax, .*label_to_obs\(labels, classes\)"),
        ((Y[:9], 0.1), r"\(y\) has 9 elements, but the outputs are \[4, 6\]: give 6 for each"),
        ((Y, np.ones(6)), r"var_obs \(noise\) has 6 elements, and mu_obs \(y\) has 24: .*one num"),
        ((Y[:9], 0.1, ALL[:9]), r"mu_obs \(y\) has 9 elements, .*: give as many for each sample"),
        ((Y[:8], 0.1, ALL[:4]), r"selected_idx has 4 elements, and mu_obs \(y\) has 8: give one"),
        ((Y, None, ALL), r"selected_idx needs var_obs \(noise\)"),
        ((Y,), r"var_obs \(noise\) is None, but a network learns its noise only if it ends in"),
    ],
)
def test_errors_name_the_arguments_of_learn(compute: Any, arguments: Any, text: str) -> None:
    model = network(compute)
    with pytest.raises(ValueError, match=text) as refusal:
        model.learn(X, *arguments)
    assert "update" not in str(refusal.value)


@COMPUTES
def test_an_unknown_noise_needs_pairs_of_outputs(compute: Any) -> None:
    model = accelerate(Sequential(Linear(3, 5), EvenExp()), compute)
    text = r"the noise of mu_obs \(y\) is unknown, so outputs must be pairs .*, but there are 5"
    with pytest.raises(ValueError, match=text):
        model.learn(X, Y[:8])
    pairs = accelerate(Sequential(Linear(3, 6), EvenExp()), compute)
    text = r"mu_obs \(y\) has 24 elements, but the outputs are \[4, 6\]: give 3 for each"
    with pytest.raises(ValueError, match=text):
        pairs.learn(X, Y)
