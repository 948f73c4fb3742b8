"""The estimators at their defaults beside scikit-learn's; see `rows`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.linear_model import BayesianRidge, LinearRegression, LogisticRegression
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.neural_network import MLPClassifier, MLPRegressor

from benchmarks.harness import tables
from benchmarks.harness.measure import Figure, Missing, Row
from tagi_ddp import Communicator, map_networks
from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor

SPLITS, TEST = 5, 0.25
MOST_OF_A_PROCESS = 1500  # Training rows, times classes, of a Gaussian process.
NINETY = 1.645  # Deviations of a normal density on either side of 90 %.
MOST_LOSS = 9  # That is shown: some intervals are empty.
COVERED = 0.85, 0.97  # Of the test rows, by 90 % intervals.

# A mean and a deviation for each test row, in the unit of the training targets' deviation.
Regressor = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def _tagi(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, deviation = TAGIRegressor(random_state=0).fit(x, y).predict(test, return_std=True)
    return mean, deviation


def _ridge(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return BayesianRidge().fit(x, y).predict(test, return_std=True)


def _process(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kernel = 1.0 * RBF(np.ones(x.shape[1])) + WhiteKernel()
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    return model.fit(x, y).predict(test, return_std=True)


def _mlp(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The deviation is that of the training residuals, as the network has none."""
    model = MLPRegressor(random_state=0, max_iter=500).fit(x, y)
    return model.predict(test), np.full(len(test), np.std(y - model.predict(x)))


def _boosting(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The deviation is that of a normal density with the same 5 % and 95 % quantiles."""
    mean = HistGradientBoostingRegressor(random_state=0).fit(x, y).predict(test)
    low, high = (
        HistGradientBoostingRegressor(loss="quantile", quantile=share, random_state=0)
        .fit(x, y)
        .predict(test)
        for share in (0.05, 0.95)
    )
    return mean, np.maximum(high - low, 1e-6) / (2 * NINETY)


def _forest(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The deviation is that of the trees' predictions."""
    model = RandomForestRegressor(random_state=0).fit(x, y)
    trees = np.array([tree.predict(test) for tree in model.estimators_])
    return trees.mean(axis=0), np.maximum(trees.std(axis=0), 1e-3)


REGRESSORS: dict[str, Regressor] = {
    "TAGI": _tagi,
    "ridge": _ridge,
    "process": _process,
    "MLP": _mlp,
    "boosting": _boosting,
    "forest": _forest,
}
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "TAGI": lambda: TAGIClassifier(random_state=0),
    "logistic": lambda: LogisticRegression(max_iter=1000),
    "process": lambda: GaussianProcessClassifier(random_state=0),
    "MLP": lambda: MLPClassifier(max_iter=500, random_state=0),
    "boosting": lambda: HistGradientBoostingClassifier(random_state=0),
    "forest": lambda: RandomForestClassifier(random_state=0),
}
SETS = {
    "chosen by": (tables.regression, tables.classification),
    "held back": (tables.held_back_regression, tables.held_back_classification),
}

Scores = dict[str, float]


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """Coverage, likelihood, error and time of all estimators at their defaults, on all sets.

    Each of 5 splits tests a quarter of the rows; inputs and targets are standardized by the
    training rows, and figures are means over the splits, in nats and in the training targets'
    standard deviation. Splits are shared out over the ranks. Rank 0 prints one table for regression
    and one for classification.
    """
    table = []
    for which, (regression, classification) in SETS.items():
        for kind, sets in (("regression", regression()), ("classification", classification())):
            names = list(sets)[:2] if quick else list(sets)
            found = _measured(communicator, kind, which, names, 1 if quick else SPLITS)
            if communicator.rank == 0 and names:
                print(f"\n{kind}, sets {which}")
                (_print_regression if kind == "regression" else _print_classification)(found)
            summary = _regression_rows if kind == "regression" else _classification_rows
            table += summary(f"sets {which}, {kind}, ", found)
    return table


def _measured(
    communicator: Communicator, kind: str, which: str, names: list[str], splits: int
) -> dict[str, dict[str, Scores]]:
    """Return by set and estimator: the mean scores."""
    methods: Mapping[str, Any] = REGRESSORS if kind == "regression" else CLASSIFIERS
    items = [
        (kind, which, name, method, split)
        for name in names
        for method in methods
        for split in range(splits)
    ]
    if not items:
        return {}
    results = map_networks(_one, items, communicator=communicator)
    found: dict[str, dict[str, list[Scores]]] = {}
    for (_, _, name, method, _), result in zip(items, results, strict=True):
        if result is not None:
            found.setdefault(name, {}).setdefault(method, []).append(result)
    return {
        name: {
            method: {key: float(np.mean([one[key] for one in each])) for key in each[0]}
            for method, each in by_method.items()
        }
        for name, by_method in found.items()
    }


def _one(item: tuple[str, str, str, str, int]) -> Scores | None:
    """Train and test one estimator on one split; None if the set is too large for it."""
    kind, which, name, method, number = item
    x, y = SETS[which][kind == "classification"]()[name]()
    splitter = (ShuffleSplit if kind == "regression" else StratifiedShuffleSplit)(
        SPLITS, test_size=TEST, random_state=0
    )
    known, test = list(splitter.split(x, y))[number]
    scale = np.where(x[known].std(axis=0) > 0, x[known].std(axis=0), 1)
    x = (x - x[known].mean(axis=0)) / scale
    size = len(known) * (len(np.unique(y)) if kind == "classification" else 1)
    if method == "process" and size > MOST_OF_A_PROCESS:
        return None
    sizes = {"rows": float(len(x)), "inputs": float(x.shape[1])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        start = time.perf_counter()
        if kind == "classification":
            model = CLASSIFIERS[method]().fit(x[known], y[known])
            probabilities = np.maximum(model.predict_proba(x[test]), 1e-15)
            scores = {
                "loss": float(-np.log(probabilities[np.arange(len(test)), y[test]]).mean()),
                "accuracy": float((probabilities.argmax(axis=1) == y[test]).mean()),
                "classes": float(len(np.unique(y))),
            }
        else:
            y = (y - y[known].mean()) / y[known].std()
            mean, deviation = REGRESSORS[method](x[known], y[known], x[test])
            z = (y[test] - mean) / deviation
            scores = {
                "loss": float((0.5 * z**2 + np.log(np.sqrt(2 * np.pi) * deviation)).mean()),
                "covered": float((np.abs(z) < NINETY).mean()),
                "rmse": float(np.sqrt(np.square(y[test] - mean).mean())),
            }
        scores["seconds"] = time.perf_counter() - start
    if kind == "regression":
        line = LinearRegression().fit(x[known], y[known]).predict(x[test])
        spread = y[test].var()
        scores["r2"] = 1 - scores["rmse"] ** 2 / spread
        scores["line"] = float(1 - np.square(y[test] - line).mean() / spread)
    return sizes | scores


def _print_regression(found: dict[str, dict[str, Scores]]) -> None:
    others = list(REGRESSORS)[1:]
    print("| set | rows x inputs | covered | others | loss | " + " | ".join(others), end=" |")
    print(" RMSE | others | R2, line's | s | others |")
    print("|---" * (10 + len(others)) + "|")
    for name, by in found.items():
        ours = by["TAGI"]
        losses = " | ".join(_shown(by, other, "loss") for other in others)
        covered, errors, seconds = (
            " ".join(_shown(by, other, key) for other in others)
            for key in ("covered", "rmse", "seconds")
        )
        print(
            f"| {name} | {ours['rows']:.0f} x {ours['inputs']:.0f} | {ours['covered']:.2f} | "
            f"{covered} | {ours['loss']:.2f} | {losses} | {ours['rmse']:.2f} | {errors} | "
            f"{ours['r2']:.2f}, {ours['line']:.2f} | {ours['seconds']:.2f} | {seconds} |"
        )


def _print_classification(found: dict[str, dict[str, Scores]]) -> None:
    others = list(CLASSIFIERS)[1:]
    print("| set | rows x inputs, classes | log-loss | " + " | ".join(others), end=" |")
    print(" accuracy | others | s | others |")
    print("|---" * (7 + len(others)) + "|")
    for name, by in found.items():
        ours = by["TAGI"]
        losses = " | ".join(_shown(by, other, "loss", 3) for other in others)
        accuracies, seconds = (
            " ".join(_shown(by, other, key) for other in others) for key in ("accuracy", "seconds")
        )
        print(
            f"| {name} | {ours['rows']:.0f} x {ours['inputs']:.0f}, {ours['classes']:.0f} | "
            f"{ours['loss']:.3f} | {losses} | {ours['accuracy']:.2f} | {accuracies} | "
            f"{ours['seconds']:.2f} | {seconds} |"
        )


def _shown(by: dict[str, Scores], method: str, key: str, digits: int = 2) -> str:
    if method not in by:
        return "-"
    value = by[method][key]
    return f"{value:.{digits}f}" if value < MOST_LOSS or key != "loss" else f"> {MOST_LOSS}"


def _regression_rows(prefix: str, found: dict[str, dict[str, Scores]]) -> list[Row]:
    if not found:
        return [_missing(prefix)]
    large = {name: by for name, by in found.items() if by["TAGI"]["rows"] >= 100}
    low, high = COVERED
    outside = sum(not low <= by["TAGI"]["covered"] <= high for by in large.values())
    behind = {name: by["TAGI"]["loss"] - by["ridge"]["loss"] for name, by in found.items()}
    below = {
        name: by["TAGI"]["line"] - by["TAGI"]["r2"]
        for name, by in found.items()
        if by["TAGI"]["rows"] >= 10 * by["TAGI"]["inputs"]
    }
    worst, deepest = max(behind, key=behind.__getitem__), max(below, key=below.__getitem__)
    return [
        Row(
            f"{prefix}1 + sets of {len(large)} whose 90 % intervals hold less than {low}, or more "
            f"than {high}",
            Figure.single(1.0 + outside),
            Figure.single(1 + len(large) / 12),
            "sets",
            1.0,
        ),
        Row(
            f"{prefix}perplexity to the ridge's, worst: {worst}",
            Figure.single(float(np.exp(behind[worst]))),
            Figure.single(float(np.exp(0.02))),
            "times",
            1.0,
        ),
        Row(
            f"{prefix}1 + R2 of the line less ours, worst: {deepest}",
            Figure.single(1 + max(below[deepest], -1.0)),
            Figure.single(1.03),
            "",
            1.0,
        ),
    ]


def _classification_rows(prefix: str, found: dict[str, dict[str, Scores]]) -> list[Row]:
    if not found:
        return [_missing(prefix)]
    places = [
        sum(by[method]["loss"] < by["TAGI"]["loss"] for method in by if method != "TAGI")
        for by in found.values()
    ]
    others = [len(by) - 1 for by in found.values()]
    last = sum(place == count for place, count in zip(places, others, strict=True))
    return [
        Row(
            f"{prefix}1 + sets of {len(places)} where two or more have a better log-loss",
            Figure.single(1.0 + sum(place >= 2 for place in places)),
            Figure.single(1 + len(places) / 3),
            "sets",
            1.0,
        ),
        Row(
            f"{prefix}1 + sets where it is the worst",
            Figure.single(1.0 + last),
            Figure.single(1.0),
            "",
            1.0,
        ),
    ]


def _missing(prefix: str) -> Row:
    reason = Missing("`pip install '.[bench]'` brings these sets")
    return Row(f"{prefix}none", reason, reason, "", None)
