"""Trackers of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor

X = np.random.default_rng(0).standard_normal((40, 3))
VALUES, LABELS = X.sum(axis=1), (X.sum(axis=1) > 0).astype(int)


class Notes:
    def __init__(self) -> None:
        self.started: list[Any] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished: list[bool] = []

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        self.started.append((name, settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((dict(metrics), step))

    def finish(self, failed: bool) -> None:
        self.finished.append(failed)


@pytest.mark.parametrize(
    ("kind", "y", "ranks", "early"),
    [
        (TAGIRegressor, VALUES, 1, True),
        (TAGIRegressor, VALUES, 2, True),
        (TAGIClassifier, LABELS, 1, False),
        pytest.param(TAGIClassifier, LABELS, 2, False, marks=pytest.mark.slow),
    ],
)
def test_each_epoch_is_logged(kind: Any, y: Any, ranks: int, early: bool) -> None:
    settings = {"n_networks": 1, "early_stopping": early, "n_ranks": ranks, "random_state": 0}
    tracker = Notes()
    estimator = kind(max_iter=3, **settings).fit(X, y, trackers=[tracker])
    assert tracker.started == [(kind.__name__, estimator.get_params())]
    assert [step for _, step in tracker.logged] == [1, 2, 3]
    assert [metrics["epoch"] for metrics, _ in tracker.logged] == [1, 2, 3]
    scores = [metrics.get("validation_score") for metrics, _ in tracker.logged]
    assert scores == (estimator.validation_scores_ if early else [None] * 3)
    assert tracker.finished == [False]


def test_a_training_that_fails() -> None:
    tracker = Notes()

    def stop(metrics: Mapping[str, float], step: int) -> None:
        raise KeyboardInterrupt

    tracker.log = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        TAGIRegressor(max_iter=3).fit(X, VALUES, trackers=[tracker])
    assert tracker.finished == [True]
    with pytest.raises(TypeError, match="trackers must have the methods start, log and finish"):
        TAGIRegressor(max_iter=3).fit(X, VALUES, trackers=[tracker.log])  # type: ignore[list-item]
