"""The estimators: scikit-learn's own checks of them, and what they promise beyond."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from pytagi import Utils
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor
from tagi_ddp.sklearn.likelihoods import Classes, Normal


@parametrize_with_checks(
    [
        TAGIRegressor((20,), max_iter=20, n_networks=2),
        TAGIRegressor((20,), max_iter=20, n_networks=1, noise=1.0, activation="tanh"),
        TAGIClassifier((20,), max_iter=10, n_networks=2),
        TAGIClassifier((20,), max_iter=20, n_networks=1),
    ]
)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def assert_equal(one: Any, other: Any) -> None:
    for posterior, its in zip(one.posteriors_, other.posteriors_, strict=True):
        assert posterior.keys() == its.keys()
        for name, parts in posterior.items():
            for part, other_part in zip(parts, its[name], strict=True):
                np.testing.assert_array_equal(part, other_part)


def waves(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, and targets in large units whose noise grows from 10 to 110."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (samples, 1))
    noise = 10 + 25 * (x[:, 0] + 2)
    return x, 1000 + 300 * np.sin(2 * x[:, 0]) + noise * rng.standard_normal(samples)


def test_noise_is_learned_where_it_is() -> None:
    model = TAGIRegressor(random_state=0).fit(*waves(2000, 0))
    x, y = waves(2000, 1)
    mean, deviation = model.predict(x, return_std=True)
    within = np.abs(y - mean) < 1.96 * deviation
    assert 0.92 < within.mean() < 0.98
    assert model.score(x, y) > 0.9
    quiet, loud = deviation[x[:, 0] < -1.5].mean(), deviation[x[:, 0] > 1.5].mean()
    assert 8 < quiet < 35
    assert 70 < loud < 130


def test_noise_may_be_given_in_the_targets_units() -> None:
    x, y = waves(500, 0)
    _, deviation = TAGIRegressor(noise=60.0, random_state=0).fit(x, y).predict(x, return_std=True)
    assert deviation.min() > 60
    assert deviation.mean() < 80
    far = TAGIRegressor(noise=60.0, random_state=0).fit(x, y).predict([[30.0]], return_std=True)
    assert far[1] > 2 * deviation.mean()  # nobody has been there


def test_several_targets_have_deviations_of_their_own() -> None:
    x, y = waves(500, 0)
    both = np.stack([y, -3 * y], axis=1)
    mean, deviation = (
        TAGIRegressor(max_iter=50, random_state=0).fit(x, both).predict(x, return_std=True)
    )
    assert mean.shape == deviation.shape == both.shape
    np.testing.assert_allclose(mean[:, 1], -3 * mean[:, 0], rtol=0.2)
    np.testing.assert_allclose(deviation[:, 1].mean() / deviation[:, 0].mean(), 3, rtol=0.3)


def test_digits() -> None:
    x, y = load_digits(return_X_y=True)
    labels = np.array([f"digit {number}" for number in y])
    model = TAGIClassifier(max_iter=10, random_state=0).fit(x[:1400], labels[:1400])
    assert model.score(x[1400:], labels[1400:]) > 0.9
    likelihood = np.log(model.predict_proba(x[1400:])[np.arange(len(y) - 1400), y[1400:]]).mean()
    assert likelihood > -0.4


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_probabilities_are_those_of_the_engine(count: int) -> None:
    """Divide the engine's, sample by sample, by their sum: some leaves of the tree are no class."""
    tree, rng = Classes(count, 0.5), np.random.default_rng(0)
    mean = rng.normal(size=(3, tree.outputs)).astype(np.float32)
    variance = rng.uniform(0.1, 1, mean.shape).astype(np.float32)
    utils = Utils()
    softmax = utils.get_hierarchical_softmax(count)
    expected = np.array(
        [
            utils.obs_to_label_prob(*pair, softmax, count)
            for pair in zip(mean, variance, strict=True)
        ]
    )
    expected /= expected.sum(axis=1, keepdims=True)
    found = tree.predict(mean.ravel(), variance.ravel())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    labels = np.array([[0], [1], [count - 1]])
    likelihoods = np.log(expected[range(3), labels[:, 0]])
    np.testing.assert_allclose(tree.log(found, labels), likelihoods, rtol=1e-5)


def test_the_likelihood_of_values_is_the_normal_one() -> None:
    normal = Normal(1, (0.5,))
    mean, variance = np.array([0.3, -1.0], np.float32), np.array([0.1, 0.2], np.float32)
    targets = np.array([[0.0], [1.0]])
    total = variance + 0.25
    expected = -0.5 * (np.log(2 * np.pi * total) + (targets[:, 0] - mean) ** 2 / total)
    found = normal.log(normal.predict(mean, variance), targets)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("noise", [None, 0.3])
def test_a_stream_is_learned_one_observation_at_a_time(noise: float | None) -> None:
    x, y = waves(200, 0)
    y = (y - 1000) / 300
    settings = {"batch_size": 1, "random_state": 0, "noise": noise}
    whole = TAGIRegressor(**settings).partial_fit(x, y)
    one = TAGIRegressor(**settings)
    for number in range(len(x)):
        one.partial_fit(x[number : number + 1], y[number : number + 1])
        if number == 99:
            one = pickle.loads(pickle.dumps(one))
    assert_equal(one, whole)
    assert (one.n_iter_, whole.n_iter_) == (200, 1)
    assert one.score(x, y) > 0.3


def test_a_classifier_learns_a_stream_after_its_fit() -> None:
    x, y = load_digits(return_X_y=True)
    model = TAGIClassifier((50,), max_iter=2, n_networks=1, random_state=0)
    model.fit(x[:400], y[:400])
    before = model.score(x[1400:], y[1400:])
    scaled = model.x_mean_.copy()
    for begin in range(400, 1400, 100):
        model.partial_fit(x[begin : begin + 100], y[begin : begin + 100])
    assert model.score(x[1400:], y[1400:]) > before + 0.02
    np.testing.assert_array_equal(model.x_mean_, scaled)
    fresh = TAGIClassifier(random_state=0).partial_fit(x[:20] / 16, y[:20], classes=range(10))
    assert fresh.predict_proba(x[:5] / 16).shape == (5, 10)


@pytest.mark.parametrize("networks", [1, 3])
def test_early_stopping_keeps_the_best_epoch(networks: int) -> None:
    x, y = load_diabetes(return_X_y=True)
    settings = {"noise": 20.0, "n_networks": networks, "random_state": 0, "tol": 0.0}
    model = TAGIRegressor((20,), n_iter_no_change=5, **settings).fit(x, y)
    scores = model.validation_scores_
    assert len(scores) == model.n_iter_ < 100
    assert np.argmax(scores) == len(scores) - 6  # five epochs were no better
    again = clone(model).set_params(max_iter=len(scores) - 5).fit(x, y)
    assert_equal(again, model)


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [False, True])
def test_ranks_train_as_one_does(early_stopping: bool) -> None:
    x, y = load_digits(return_X_y=True)
    settings = {"max_iter": 3, "batch_size": 32, "n_networks": 2, "random_state": 0}
    one, two = (
        TAGIClassifier(n_ranks=ranks, early_stopping=early_stopping, **settings).fit(x, y)
        for ranks in (1, 2)
    )
    assert_equal(two, one)
    assert one.n_iter_ == two.n_iter_


def test_it_is_a_part_of_pipelines_and_searches() -> None:
    x, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(
        PolynomialFeatures(2), TAGIRegressor(max_iter=5, n_networks=2, random_state=0)
    )
    search = GridSearchCV(pipeline, {"tagiregressor__hidden_layer_sizes": [(5,), (20, 20)]}, cv=3)
    search.fit(x, y)
    assert search.best_score_ > 0.3
    predicted = cross_val_predict(search.best_estimator_, x, y, cv=3)
    assert np.corrcoef(predicted, y)[0, 1] > 0.6


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (TAGIRegressor(noise=-1.0), "noise must be a positive number or None, got -1.0"),
        (TAGIRegressor(activation="swish"), "activation must be one of relu, .* got 'swish'"),
        (TAGIRegressor(hidden_layer_sizes=()), "hidden_layer_sizes must name a hidden layer"),
        (TAGIRegressor(hidden_layer_sizes=(0,)), "hidden_layer_sizes must be"),
        (TAGIRegressor(max_iter=0), "max_iter must be"),
        (TAGIRegressor(n_ranks=0), "n_ranks must be"),
        (TAGIRegressor(n_networks=0), "n_networks must be"),
        (
            TAGIRegressor(n_networks=1, validation_fraction=1.0),
            "validation_fraction must be between 0 and 1",
        ),
    ],
)
def test_wrong_settings_are_named(model: Any, text: str) -> None:
    x, y = waves(20, 0)
    with pytest.raises(ValueError, match=text):
        model.fit(x, y)


def test_wrong_labels_are_named() -> None:
    x = np.eye(4)
    model = TAGIClassifier()
    with pytest.raises(ValueError, match="classes must be given in the first call"):
        model.partial_fit(x, [0, 1, 0, 1])
    model.partial_fit(x, [0, 1, 0, 1], classes=[0, 1])
    with pytest.raises(ValueError, match=r"y has labels \[2\], which are not among \[0 1\]"):
        model.partial_fit(x, [0, 1, 0, 2])
    with pytest.raises(ValueError, match=r"classes must be \[0 1\], as before"):
        model.partial_fit(x, [0, 1, 0, 1], classes=[0, 1, 2])


def test_without_scikit_learn_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['sklearn'] = None; import tagi_ddp; import tagi_ddp.sklearn"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ImportError: tagi_ddp.sklearn needs scikit-learn: pip install" in done.stderr
