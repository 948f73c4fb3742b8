"""predict: what evaluation by hand gives, for any number of samples, and nothing else changes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import NETWORKS, fresh
from support.rank_pool import RankPool

import tagi_ddp
from sequential.test_rollback import difference

COMPUTES = ["engine", "native", "torch"]
ROWS = st.one_of(st.integers(0, 5), st.sampled_from([255, 256, 257, 258, 512, 513, 700]))


def regression(*outputs: int, learns_noise: bool = False, compute: Any = "native") -> Any:
    """Return a network of 3 inputs that has learned a little."""
    import pytagi
    from pytagi.nn import EvenExp, Linear, ReLU, Sequential

    pytagi.manual_seed(1)
    last = [EvenExp()] if learns_noise else []
    model = tagi_ddp.accelerate(
        Sequential(Linear(3, 8), ReLU(), Linear(8, *outputs), *last), compute
    )
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    targets = x[:, : outputs[0] // (2 if learns_noise else 1)]
    model.learn(x, targets, None if learns_noise else 1.0)
    return model


def by_hand(model: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of one forward pass in evaluation mode, [samples, outputs]."""
    model.eval()
    mean, variance = model(x)
    model.train()
    return mean.reshape(len(x), -1), variance.reshape(len(x), -1)


@pytest.fixture(scope="module")
def trained() -> Callable[[str, bool], Any]:
    made: dict[tuple[str, bool], Any] = {}

    def get(compute: str, learns_noise: bool) -> Any:
        key = compute, learns_noise
        if key not in made:
            made[key] = regression(2, learns_noise=learns_noise, compute=compute)
        return made[key]

    return get


@pytest.mark.parametrize("compute", COMPUTES)
@settings(max_examples=10)
@given(
    rows=ROWS,
    learns_noise=st.booleans(),
    kind=st.sampled_from(["none", "number", "by output", "by row", "flat"]),
    flat=st.booleans(),
    seed=st.integers(0, 99),
)
def test_predictions_are_those_by_hand_and_the_noise(
    trained: Any, compute: str, rows: int, learns_noise: bool, kind: str, flat: bool, seed: int
) -> None:
    model = trained(compute, learns_noise)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    outputs = 1 if learns_noise else 2
    shape = {"number": (), "by output": outputs, "flat": rows * outputs}.get(kind, (rows, outputs))
    noise = None if kind == "none" else rng.uniform(0, 2, shape)
    mean, variance = model.predict(x.ravel() if flat else x, noise)
    assert mean.shape == variance.shape == (rows, outputs)
    assert mean.dtype == variance.dtype == np.float32
    expected, spread = by_hand(model, x) if rows else (np.empty((0, 2)), np.empty((0, 2)))
    added = (
        0.0 if noise is None else np.reshape(noise, (rows, outputs)) if kind == "flat" else noise
    )
    if learns_noise:
        added = expected[:, 1::2] if noise is None else added
        expected, spread = expected[:, ::2], spread[:, ::2]
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, spread + added, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network_has_as_many_outputs_as_it_computes(name: str) -> None:
    model = tagi_ddp.accelerate(fresh(name))
    x, _ = NETWORKS[name].batch(0, 4)
    mean, _ = model.predict(x)
    np.testing.assert_allclose(mean, by_hand(model, x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("x", [np.zeros((2, 3)), np.zeros(4), np.zeros((9, 2)), "inputs"], ids=str)
def test_the_mode_is_as_before_also_after_an_error(training: bool, x: Any) -> None:
    model = regression(1)
    model.train() if training else model.eval()
    wrong = pytest.raises((TypeError, ValueError), match=r"x (has|must be an array)")
    with contextlib.nullcontext() if np.shape(x) == (2, 3) else wrong:
        model.predict(x)
    assert [layer.training for layer in model.layers] == [training] * 3


@pytest.mark.parametrize("name", ["batch_norm", "lstm"])
def test_statistics_and_states_are_as_evaluation_leaves_them(name: str) -> None:
    states = []
    for evaluate in (lambda model, x: model.predict(x), by_hand):
        model = tagi_ddp.accelerate(fresh(name))
        for seed in range(3):
            x, y = NETWORKS[name].batch(seed, 4)
            model.learn(x, y, 0.5)
            evaluate(model, x)
        states.append(copy.deepcopy(model.run_state()))
    assert not difference(*states)


def test_a_series_goes_on_from_sample_to_sample() -> None:
    import pytagi
    from pytagi.nn import LSTM, Linear, Sequential

    pytagi.manual_seed(0)
    model = tagi_ddp.accelerate(Sequential(LSTM(1, 4, seq_len=1), Linear(4, 1)))
    first, second = (model.predict([1.0])[0].item() for _ in range(2))
    model.reset_lstm_states()
    assert model.predict([1.0])[0].item() == first != second


@pytest.mark.parametrize(
    ("noise", "text"),
    [
        (-0.1, r"noise is a variance, finite and at least 0, got -0\.1"),
        ([1, np.nan], "noise is a variance, finite and at least 0, got nan"),
        ([1, 2, 3], r"noise has shape \(3,\): give one number, one for each of the 2 outputs, or"),
        (np.ones((2, 5)), r"noise has shape \(2, 5\): .* an array of \[5, 2\]"),
        ("much", "noise must be an array of numbers, got a str"),
    ],
    ids=str,
)
def test_a_wrong_noise_is_named(noise: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        regression(2).predict(np.zeros((5, 3)), noise)


def test_pairs_of_a_value_and_its_noise_need_an_even_number_of_outputs() -> None:
    from pytagi.nn import EvenExp, Linear, Sequential

    model = tagi_ddp.accelerate(Sequential(Linear(3, 3), EvenExp()))
    with pytest.raises(ValueError, match="3 outputs: give it an even number"):
        model.predict(np.zeros((5, 3)))


def predict_alone(comm: Any, name: str) -> tuple[str, bool]:
    """Predict as often as this rank likes, between the steps of all."""
    model = tagi_ddp.DDPSequential(fresh(name), communicator=comm, average=False)
    equal = True
    for step in range(3):
        x, y = NETWORKS[name].batch(10 * step + comm.rank, 4 + comm.rank)
        model.learn(x, y, 0.5)
        for seed in range(comm.rank + 1):
            mean, _ = model.predict(NETWORKS[name].batch(seed, 300 + comm.rank)[0])
            alone, _ = model.predict(NETWORKS[name].batch(seed, 300 + comm.rank)[0][:9])
            equal &= np.allclose(mean[:9], alone, rtol=1e-4, atol=1e-5)
    return model.check_replicas(), equal


@pytest.mark.parametrize("name", ["mlp", "embedding"])
def test_each_rank_predicts_by_itself(shm: RankPool, name: str) -> None:
    (hash_0, equal_0), (hash_1, equal_1) = shm.run(predict_alone, name, size=2)
    assert hash_0 == hash_1
    assert equal_0
    assert equal_1
