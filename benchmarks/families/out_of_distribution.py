"""Images of another kind than those that a network has learned; see `rows`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mnist import BATCH, CAP_FACTOR, SIGMA_V, network
from sklearn.metrics import roc_auc_score

from benchmarks.harness.classify import (
    LIMIT,
    Setting,
    figure_of,
    of_seeds,
    plural,
    probabilities,
    train,
)
from benchmarks.harness.datasets import images, seen_as
from benchmarks.harness.measure import Figure, Missing, Row
from examples.images import ImageData
from tagi_ddp import Communicator, DDPSequential

SEEDS, EPOCHS = 3, 9
RANKS = 4
DUQ = {"accuracy": 92.4, "AUROC": 0.955}
BARS = {"accuracy": 91.5, "AUROC": 0.97}


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """Train on Fashion-MNIST, and tell MNIST from it, against DUQ's figures.

    J. van Amersfoort, L. Smith, Y. W. Teh, Y. Gal, Uncertainty estimation using a single deep
    deterministic neural network, ICML 2020. Means over seeds [the least, the greatest] of merges
    of 4 ranks. AUROC: the probability that a score is higher for an image of MNIST than for one of
    Fashion-MNIST, by the entropy of the class probabilities, and by output variances; and that it
    is higher for an image whose label is predicted wrong.
    """
    known = images("fashion-mnist", 200 if quick else None)
    other = seen_as("mnist", "fashion-mnist", 200 if quick else None)
    for found in (known, other):
        if isinstance(found, str):
            return [Row("out of distribution", Missing(found), Missing(found), "", None)]
    epochs, seeds = (1, 1) if quick else (EPOCHS, SEEDS)
    ranks = min(RANKS, communicator.size)
    setting = Setting(network, BATCH, epochs, SIGMA_V, BATCH // ranks, CAP_FACTOR)
    judged = of_seeds(
        communicator,
        ranks,
        seeds,
        lambda seed, group: _judge(setting, known, other, seed, group),
    )
    return _rows(f"merges of {plural(ranks)}, {epochs} epochs", judged)


def _judge(
    setting: Setting, known: ImageData, other: np.ndarray, seed: int, group: Communicator
) -> list[float]:
    """Return the accuracy in %, and four areas under curves."""
    with train(setting, known, seed, group) as model:
        chosen = probabilities(model, known.x_test)
        entropy = [_entropy(chosen), _entropy(probabilities(model, other))]
        spread = [_spread(model, part) for part in (known.x_test, other)]
        group.barrier(timeout=LIMIT)
    wrong = chosen.argmax(axis=1) != known.y_test
    areas = [_area(*entropy), _area(*spread)]
    areas += [_area(score[0][~wrong], score[0][wrong]) for score in (entropy, spread)]
    return [100 * float(np.mean(~wrong)), *areas]


def _rows(name: str, found: list[list[float]]) -> list[Row]:
    none = Missing("no figure was published")
    chance = Figure.single(0.5)
    figures = [figure_of(values) for values in zip(*found, strict=True)]
    accuracy, entropy, spread, wrong_entropy, wrong_spread = figures
    error = Figure(100 - accuracy.median, 100 - accuracy.high, 100 - accuracy.low)
    return [
        Row(
            f"{name}, error on Fashion-MNIST",
            *(error, Figure.single(100 - DUQ["accuracy"]), "%"),
            (100 - DUQ["accuracy"]) / (100 - BARS["accuracy"]),
        ),
        Row(
            f"{name}, MNIST by entropy, 1 - AUROC",
            *(_less(entropy), Figure.single(1 - DUQ["AUROC"]), ""),
            (1 - DUQ["AUROC"]) / (1 - BARS["AUROC"]),
        ),
        Row(f"{name}, MNIST by output variance, 1 - AUROC", _less(spread), none, "", None),
        Row(f"{name}, own errors by entropy, 1 - AUROC", _less(wrong_entropy), chance, "", None),
        Row(
            f"{name}, own errors by output variance, 1 - AUROC",
            *(_less(wrong_spread), chance, "", None),
        ),
    ]


def _less(figure: Figure) -> Figure:
    return Figure(1 - figure.median, 1 - figure.high, 1 - figure.low)


def _entropy(chosen: np.ndarray) -> np.ndarray:
    return -np.sum(chosen * np.log(np.maximum(chosen, np.finfo(float).tiny)), axis=1)


def _spread(model: DDPSequential, images: np.ndarray) -> np.ndarray:
    """Return the mean variance of each image's outputs."""
    parts = [model.predict(part)[1] for part in np.array_split(images, max(1, len(images) // 500))]
    return np.concatenate([part.reshape(len(part), -1).mean(axis=1) for part in parts])


def _area(low: np.ndarray, high: np.ndarray) -> float:
    """Return the probability that a score of ``high`` exceeds one of ``low``."""
    labels = np.repeat([0, 1], [len(low), len(high)])
    return float(roc_auc_score(labels, np.concatenate([low, high])))
