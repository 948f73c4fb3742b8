"""The likelihood of a linear head by batches and ranks; see `rows`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from pytagi.nn import Linear, Sequential

from benchmarks.harness.classify import Setting, plural, scores_of_seeds
from benchmarks.harness.datasets import images
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import TREE
from examples.images import ImageData
from tagi_ddp import Communicator

FEATURES, LOCAL = 512, 32
BATCHES = (32, 256, 1024, 4096)
RANKS = (1, 4, 16)
BAR = 0.0015  # nats, the spread that was published for batches of 32 to 256 on one GPU
NOISES = (1.0, 3.0)  # the best likelihood; no sum of 4096 samples goes too far


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """One pass of Fashion-MNIST, 512 random features that do not correlate: batches 32 to 4096.

    Negative log-likelihoods of the test images, and their spread, the greatest less the least: sums
    with the engine's cap factor and without a limit, and local batches of 32 without a limit,
    merged on 1 to 16 ranks by either rule.
    """
    data = images("fashion-mnist", 2000 if quick else None)
    if isinstance(data, str):
        return [Row("batch invariance", Missing(data), Missing(data), "", None)]
    data = _features(data, 64 if quick else FEATURES)
    width = data.x_train.shape[1]
    ranks = tuple(number for number in RANKS if number <= communicator.size)
    table: list[Row] = []
    for noise in NOISES:
        sums = Setting(lambda: Sequential(Linear(width, TREE.outputs)), 1, 1, noise)
        name = f"noise {noise:g}, sums, "
        table += _of(communicator, name + "the engine's cap factor", sums, (1,), data)
        sums = replace(sums, cap_factor=0.0)
        table += _of(communicator, name + "no limit", sums, (1,), data)
        for rule in ("bayes", "agreement"):
            local = replace(sums, local=LOCAL, merge=rule)
            name = f"noise {noise:g}, local batches of {LOCAL}, {rule}"
            table += _of(communicator, name, local, ranks, data)
    return table


def _of(
    communicator: Communicator, name: str, setting: Setting, ranks: tuple[int, ...], data: ImageData
) -> list[Row]:
    none = Missing("the spread is compared")
    found = np.empty((len(ranks), len(BATCHES)))
    table = []
    for row, number in enumerate(ranks):
        for column, batch in enumerate(BATCHES):
            local = min(setting.local, batch // number)
            each = replace(setting, batch=batch, local=local)
            (scores,) = scores_of_seeds(communicator, number, 1, each, data)
            found[row, column] = -scores.log_likelihood
            text = f"{name}, batch {batch}, {plural(number)}"
            table.append(Row(text, Figure.single(found[row, column]), none, "nats", None))
    for count in range(2, len(BATCHES) + 1):
        spread = Figure.single(1000 * float(np.ptp(found[:, :count])))
        text = f"{name}, spread over batches {BATCHES[0]} to {BATCHES[count - 1]}"
        text += f" and {ranks[0]} to {ranks[-1]} ranks" * (len(ranks) > 1)
        table.append(Row(text, spread, Figure.single(1000 * BAR), "mnats", 1.0))
    return table


def _features(data: ImageData, count: int) -> ImageData:
    """Return random features, of mean 0 and covariance 1 over the training images."""
    generator = np.random.default_rng(0)
    pixels = data.x_train.shape[1]
    weights = generator.normal(size=(pixels, count)) / np.sqrt(pixels)
    offsets = 0.1 * generator.normal(size=count)
    train, test = (np.maximum(part @ weights + offsets, 0) for part in (data.x_train, data.x_test))
    mean = train.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(train, rowvar=False))
    whiten = vectors / np.sqrt(values)
    both = [((part - mean) @ whiten).astype(np.float32) for part in (train, test)]
    return ImageData(both[0], data.y_train, both[1], data.y_test)
