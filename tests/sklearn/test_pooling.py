"""Networks that leave samples out, beside a linear model: each counts as left-out samples show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.datasets import load_diabetes, make_classification, make_friedman1, make_regression
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import scale

from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor
from tagi_ddp.sklearn.likelihoods import Classes, Normal
from tagi_ddp.sklearn.lines import LogisticLine


def loss(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    mean, deviation = model.predict(x, return_std=True)
    return float(-norm(mean, deviation).logpdf(y).mean())


def noise() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(300, 8)), rng.normal(size=300)


@pytest.mark.parametrize(
    ("x", "y", "gain"),
    [
        pytest.param(*load_diabetes(return_X_y=True), -0.02, id="diabetes"),
        pytest.param(*make_friedman1(500, noise=1.0, random_state=0), 0.3, id="friedman"),
        pytest.param(*make_regression(300, 10, noise=20.0, random_state=0), -0.02, id="linear"),
        pytest.param(*noise(), -0.02, id="noise"),
    ],
)
def test_the_defaults_are_honest(x: np.ndarray, y: np.ndarray, gain: float) -> None:
    """Intervals hold what they say, and no straight line is a better prediction."""
    y = y / y.std()
    covered, gains = [], []
    for seed in range(2):
        known_x, test_x, known_y, test_y = train_test_split(x, y, random_state=seed)
        model = TAGIRegressor(random_state=seed).fit(known_x, known_y)
        mean, deviation = model.predict(test_x, return_std=True)
        covered.append(np.mean(np.abs(test_y - mean) < 1.645 * deviation))
        gains.append(loss(BayesianRidge().fit(known_x, known_y), test_x, test_y))
        gains[-1] -= loss(model, test_x, test_y)
    assert 0.85 < np.mean(covered) < 0.97
    assert np.mean(gains) > gain


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_a_classifier_is_no_worse_than_a_line(wrong: float) -> None:
    x, y = make_classification(600, 10, n_informative=5, flip_y=wrong, random_state=0)
    known_x, test_x, known_y, test_y = train_test_split(scale(x), y, random_state=0)
    model = TAGIClassifier(max_iter=50, random_state=0).fit(known_x, known_y)
    line = LogisticRegression().fit(known_x, known_y)
    ours, lines = (log_loss(test_y, each.predict_proba(test_x)) for each in (model, line))
    assert ours < lines + 0.01 - 0.05 * (wrong == 0)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.floats(0.1, 3), st.floats(0.1, 3))
def test_densities_are_multiplied(seed: int, a: float, b: float) -> None:
    rng = np.random.default_rng(seed)
    line, networks = (
        np.stack([rng.normal(size=(4, 1)), rng.uniform(0.1, 2, (4, 1))]) for _ in range(2)
    )
    mean, variance = Normal(1, None).pooled(line, networks, np.array([[a], [b]]))
    grid = np.linspace(-40, 40, 8001)
    for row in range(4):
        logs = sum(
            power * norm(each[0, row], np.sqrt(each[1, row])).logpdf(grid)
            for power, each in ((a, line), (b, networks))
        )
        weights = np.exp(logs - logs.max())
        expected = np.average(grid, weights=weights)
        np.testing.assert_allclose(mean[row, 0], expected, atol=1e-4)
        spread = np.average((grid - expected) ** 2, weights=weights)
        np.testing.assert_allclose(variance[row, 0], spread, rtol=1e-3)
    probabilities = rng.dirichlet(np.ones(3), (2, 4))
    product = probabilities[0] ** a * probabilities[1] ** b
    np.testing.assert_allclose(
        Classes(3, 1.0).pooled(*probabilities, np.array([a, b])),
        product / product.sum(axis=1, keepdims=True),
    )


@pytest.mark.parametrize("certain", [0.25, 1.0, 4.0])
def test_deviations_are_scaled_to_the_left_out_errors(certain: float) -> None:
    """Predictions that are too sure, or not enough, are known by the left-out targets."""
    rng = np.random.default_rng(0)
    normal, targets = Normal(2, None), rng.normal(size=(2000, 2))
    right = np.stack([targets + 0.5 * rng.normal(size=(2000, 2)), np.full((2000, 2), 0.25)])
    useless = np.stack([rng.normal(size=(2000, 2)), np.full((2000, 2), 2.0)])
    right[1] *= [certain, 1.0]
    powers = normal.powers(useless, right, targets)
    _, variance = normal.pooled(useless, right, powers)
    np.testing.assert_allclose(variance.mean(axis=0), 1 / (1 + 1 / 0.25), rtol=0.4)
    np.testing.assert_allclose(powers[1], [certain, 1.0], rtol=0.4)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 2**31 - 1), st.booleans())
def test_each_sample_is_left_out_once(samples: int, networks: int, seed: int, by: bool) -> None:
    labels = np.random.default_rng(seed).integers(0, 3, (samples, 1))
    model = TAGIRegressor(n_networks=networks, early_stopping=False)
    parts = model._left_out(samples, seed, labels if by else None)
    assert len(parts) == max(1, min(networks, samples // 2))
    if len(parts) == 1:
        assert not len(parts[0])
        return
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(samples))
    for counted in (labels >= 0, labels == 0, labels == 1) if by else (labels >= 0,):
        counts = [counted[part].sum() for part in parts]
        assert max(counts) - min(counts) <= (1 if counted.all() else 2)


@pytest.mark.parametrize("samples", [2, 3, 4, 7, 12])
def test_few_samples_are_enough(samples: int) -> None:
    x, y = make_friedman1(samples, noise=1.0, random_state=0)
    model = TAGIRegressor(max_iter=3, random_state=0).fit(x, y)
    mean, deviation = model.predict(x, return_std=True)
    assert np.isfinite(mean).all()
    assert (deviation > 0).all()
    assert len(model.posteriors_) == max(1, min(5, samples // 2))
    labels = np.arange(samples) == 0  # The only one of its class is left out once.
    classifier = TAGIClassifier(max_iter=3, random_state=0).fit(x, labels)
    np.testing.assert_allclose(classifier.predict_proba(x).sum(axis=1), 1)


def test_a_line_of_one_class_predicts_it() -> None:
    line = LogisticLine(np.zeros((4, 2)), np.full((4, 1), 1), 3)
    np.testing.assert_allclose(line.predict(np.zeros((2, 2))), [[0, 1, 0]] * 2, atol=1e-5)


def test_all_networks_go_on_with_a_stream() -> None:
    x, y = make_friedman1(300, noise=1.0, random_state=0)
    model = TAGIRegressor((20,), max_iter=3, n_networks=3, random_state=0).fit(x[:200], y[:200])
    before = model.posteriors_
    model.partial_fit(x[200:], y[200:])
    for posterior, earlier in zip(model.posteriors_, before, strict=True):
        assert all(np.any(posterior[name][0] != earlier[name][0]) for name in posterior)
    with pytest.raises(AttributeError, match="n_networks has been 3: use posteriors_"):
        _ = model.posterior_
