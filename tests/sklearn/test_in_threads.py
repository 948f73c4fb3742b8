"""Estimators in several threads: one for all of them, and one for each."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from joblib import parallel_config
from sklearn.inspection import permutation_importance
from support.threads import THREADS, in_threads

from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor

# Of the first the backend's kernels compute all; of the second, torch large batches.
SIZES = [(20,), (300, 300)]


def samples(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return x, x.sum(axis=1) + 0.1 * rng.normal(size=count)


def fitted(kind: type, sizes: tuple[int, ...], seed: int, noise: float | None) -> Any:
    x, y = samples(seed, 120)
    model = kind(sizes, max_iter=2, n_networks=2, random_state=seed, noise=noise)
    return model.fit(x, y if kind is TAGIRegressor else (y > 0).astype(int))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", [TAGIRegressor, TAGIClassifier])
@pytest.mark.parametrize("first", ["fit", "unpickled"])
def test_threads_ask_one_estimator(kind: type, sizes: tuple[int, ...], first: str) -> None:
    """Every answer has the bits that it has alone, whoever makes the network again."""
    model = fitted(kind, sizes, 0, None)
    rng = np.random.default_rng(len(sizes))
    calls: list[Callable[[Any], Any]] = []
    for count in rng.integers(1, 400, 40):
        x, y = samples(int(count), int(count))
        kinds: list[Callable[..., Any]] = [
            lambda m, x=x: m.predict(x),
            lambda m, x=x: m.predict(x, True) if kind is TAGIRegressor else m.predict_proba(x),
            lambda m, x=x, y=y: [m.score(x, y if kind is TAGIRegressor else y > 0)],
            lambda m: [part for each in m.posteriors_ for pair in each.values() for part in pair],
        ]
        calls.append(kinds[rng.integers(len(kinds))])
    wanted = [call(model) for call in calls]
    asked = pickle.loads(pickle.dumps(model)) if first == "unpickled" else model
    got = in_threads([lambda call=call: call(asked) for call in calls])
    for answer, right in zip(got, wanted, strict=True):
        assert len(answer) == len(right)
        assert all(map(np.array_equal, answer, right))


@pytest.mark.parametrize(
    "sizes", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", [TAGIRegressor, TAGIClassifier])
def test_each_thread_fits_an_estimator(kind: type, sizes: tuple[int, ...]) -> None:
    before = np.random.get_state()[1].copy()
    seeds = range(THREADS if len(sizes) > 1 else 3 * THREADS)
    wanted = [fitted(kind, sizes, seed, 1.0).posteriors_ for seed in seeds]
    got = in_threads([lambda s=s: fitted(kind, sizes, s, 1.0).posteriors_ for s in seeds])
    for posteriors, right in zip(got, wanted, strict=True):
        for posterior, its in zip(posteriors, right, strict=True):
            for name, parts in its.items():
                for a, b in zip(posterior[name], parts, strict=True):
                    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_a_prediction_is_that_of_one_fit() -> None:
    """While another thread fits an estimator anew, each prediction is of one fit as a whole."""
    model = TAGIRegressor((20,), max_iter=2, n_networks=2, noise=1.0, random_state=0)
    x, y = samples(0, 100)
    right = []
    for factor in (1.0, 1000.0):
        right.append(model.fit(factor * x, factor * y).predict(x).tobytes())

    def fit() -> None:
        for factor in (1.0, 1000.0) * 10:
            model.fit(factor * x, factor * y)

    def predict() -> list[bytes]:
        return [model.predict(x).tobytes() for _ in range(60)]

    answers = in_threads([fit, *[predict] * (THREADS - 1)])[1:]
    assert {answer for each in answers for answer in each} <= set(right)


def test_scikit_learn_asks_in_threads() -> None:
    model = fitted(TAGIRegressor, (300, 300), 0, None)
    x, y = samples(1, 300)
    importances = []
    for jobs in (1, THREADS):
        with parallel_config(backend="threading", n_jobs=jobs):
            found = permutation_importance(model, x, y, n_repeats=4, random_state=0)
        importances.append(found.importances)
    np.testing.assert_array_equal(*importances)
