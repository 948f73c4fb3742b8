"""A fitted estimator stays as it is, whatever fails later and whatever settings are changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor

X = np.random.default_rng(0).standard_normal((40, 3))
VALUES, LABELS = X.sum(axis=1), (X.sum(axis=1) > 0).astype(int)

WRONG = [
    {"hidden_layer_sizes": (0,)},
    {"activation": "Relu"},
    {"noise": -1.0},
    {"max_iter": 0},
    {"batch_size": 0},
    {"n_networks": 0},
    {"n_networks": 1, "validation_fraction": 0.99},
    {"n_ranks": 0},
    {"timeout": 0.0},
    {"random_state": "seed"},
]
CHANGED = [
    {"hidden_layer_sizes": (10, 10)},
    {"activation": "tanh"},
    {"noise": 0.1},
    {"batch_size": 3},
    {"random_state": 1},
    {"activation": "Relu", "hidden_layer_sizes": ()},  # what is wrong does no harm either
]
estimators = pytest.mark.parametrize(
    ("kind", "y"), [(TAGIRegressor, VALUES), (TAGIClassifier, LABELS)]
)


def known(model: Any, x: np.ndarray = X) -> np.ndarray:
    """Return all that the model predicts."""
    if isinstance(model, TAGIClassifier):
        return model.predict_proba(x)
    return np.array(model.predict(x, return_std=True))


def streamed(model: Any, y: np.ndarray) -> Any:
    """Train the model by `partial_fit` alone; return it."""
    classes = {"classes": [0, 1]} if isinstance(model, TAGIClassifier) else {}
    return model.partial_fit(X, y, **classes)


def fitted(model: Any, y: np.ndarray) -> Any:
    return model.fit(X, y)


@estimators
@pytest.mark.parametrize("wrong", WRONG)
def test_a_failed_fit_leaves_the_estimator_as_it_was(kind: Any, y: Any, wrong: Any) -> None:
    model = kind(max_iter=2, random_state=0)
    right, wider = model.get_params(), np.hstack([10 * X + 5, X])
    for _ in range(2):
        with pytest.raises((ValueError, TypeError)):
            model.set_params(**wrong).fit(wider, y * 2)
        with pytest.raises(NotFittedError):
            model.predict(X)
    expected = known(model.set_params(**right).fit(X, y))
    with pytest.raises((ValueError, TypeError)):
        model.set_params(**wrong).fit(wider, y * 2)
    np.testing.assert_array_equal(known(model), expected)


@estimators
@pytest.mark.parametrize("wrong", [{"activation": "Relu"}, {"noise": -1.0}, {"batch_size": 0}])
def test_a_stream_begins_when_its_settings_are_mended(kind: Any, y: Any, wrong: Any) -> None:
    model = kind(random_state=0)
    right = model.get_params()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        streamed(model.set_params(**wrong), y)
    np.testing.assert_array_equal(
        known(streamed(model.set_params(**right), y)), known(streamed(kind(random_state=0), y))
    )


@estimators
@pytest.mark.parametrize("learned", [fitted, streamed])
@pytest.mark.parametrize("changed", CHANGED)
def test_settings_count_from_the_next_fit(
    kind: Any, y: Any, learned: Callable[[Any, Any], Any], changed: dict[str, Any]
) -> None:
    model = learned(kind(max_iter=2, random_state=0), y)
    expected = known(model)
    model.set_params(**changed)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for same in copies:
        np.testing.assert_array_equal(known(same), expected)
        streamed(same, y)
    for same in copies[1:]:
        np.testing.assert_array_equal(known(same), known(model))


def test_predictions_have_the_shape_of_the_first_targets() -> None:
    model = TAGIRegressor(max_iter=1, random_state=0).fit(X, VALUES)
    with pytest.raises(ValueError, match="y has 2 targets, expected 1"):
        model.partial_fit(X, np.stack([VALUES, VALUES], axis=1))
    assert model.partial_fit(X, VALUES[:, None]).predict(X).shape == VALUES.shape


@estimators
@pytest.mark.parametrize("method", ["predict", "fit"])
def test_after_ctrl_c_it_goes_on_as_if_nothing_had_been(
    kind: Any, y: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind(max_iter=1, n_networks=2, random_state=0).fit(X, y)
    undisturbed = copy.deepcopy(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(model._models[0]), "__call__", interrupt)
        arguments = (10 * X, y) if method == "fit" else (X,)
        with pytest.raises(KeyboardInterrupt):
            getattr(model, method)(*arguments)
    expected = known(undisturbed.partial_fit(X, y))
    np.testing.assert_array_equal(known(model.partial_fit(X, y)), expected)


@pytest.mark.parametrize("samples", [1, 2, 3, 40])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.8, 0.9, 0.99])
def test_samples_are_left_to_train_on(samples: int, fraction: float) -> None:
    model = TAGIRegressor(max_iter=2, n_networks=1, validation_fraction=fraction, random_state=0)
    if max(1, round(samples * fraction)) < samples:
        scores = model.fit(X[:samples], VALUES[:samples]).validation_scores_
        assert scores[0] != scores[1]
    else:
        with pytest.raises(
            ValueError, match=f"validation_fraction .* {fraction} with n_samples = {samples}"
        ):
            model.fit(X[:samples], VALUES[:samples])
