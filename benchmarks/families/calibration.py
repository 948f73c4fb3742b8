"""The calibration of merged posteriors; see `rows`."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytagi
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

from benchmarks.harness.classify import probabilities
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import TREE, ImageTask
from examples.images import ImageData, load_images
from tagi_ddp import Communicator, DDPSequential, DistributedSampler
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.data import class_scores

SYNC_EVERY = 8
WORSE = 1.05  # how many times one process's figures may be
NOISE = 0.3  # of Auto MPG's target, in its standard deviations: what the inputs do not tell


@dataclass(frozen=True)
class Quality:
    """Mean negative log-likelihood, calibration error and error in percent, of the test samples."""

    nll: float
    calibration: float
    error: float = float("nan")


Train = Callable[[Communicator, dict[str, Any]], Quality]


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(k) 2 and 4 ranks that merge every 8 steps, against one process on all batches."""
    tasks: list[tuple[str, Train, float | None]] = []
    found: list[Row] = []
    for name, make, target in SETS:
        try:
            tasks.append((name, make(quick), target))
        except (FileNotFoundError, ImportError) as error:
            missing = Missing(f"{error}: see `pip install '.[bench]'`")
            found.append(Row(f"calibration, {name}", missing, missing, "", None))
    for name, train, target in tasks:
        if communicator.rank == 0:
            alone = train(SingleCommunicator(), {"average": False})
        for size in (2, 4):
            part = communicator.split(0 if communicator.rank < size else None)
            if part is not None:
                with part:
                    merged = train(part, {"reduction": "precision", "sync_every": SYNC_EVERY})
            if communicator.rank > 0:
                continue
            found += [
                Row(
                    f"{what}, {name}, {size} ranks, a merge every {SYNC_EVERY} steps",
                    Figure.single(ours),
                    Figure.single(other),
                    unit,
                    target,
                )
                for what, ours, other, unit in (
                    ("negative log-likelihood", merged.nll, alone.nll, "nats"),
                    ("calibration error", merged.calibration, alone.calibration, "%"),
                )
            ]
    return found


# --- images ----------------------------------------------------------------------------------


def _images(quick: bool, batch: int) -> Train:
    data = load_images("digits", limit=100) if quick else load_images("fashion-mnist")
    return lambda group, options: _classify(group, options, data, batch, 1 if quick else 2)


def _classify(
    group: Communicator, options: dict[str, Any], data: ImageData, batch: int, epochs: int
) -> Quality:
    task = ImageTask(data)
    pytagi.manual_seed(1)
    network = Sequential(
        Linear(data.side**2, 128),
        ReLU(),
        Linear(128, 128),
        ReLU(),
        Linear(128, TREE.outputs),
    )
    with DDPSequential(network, communicator=group, compute="torch", **options) as model:
        model.set_threads(1)
        sampler = DistributedSampler(data.x_train, group.size, group.rank)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for share in sampler.batches(batch):
                task.step(model, share)
        if "sync_every" in options:
            model.merge()
        return rate_labels(model, data)


def rate_labels(model: DDPSequential, data: ImageData) -> Quality:
    """Return how good a model's labels of the test images are."""
    scores = class_scores(probabilities(model, data.x_test), data.y_test)
    return Quality(-scores.log_likelihood, 100 * scores.calibration_error, 100 * scores.error)


# --- a regression set of the UCI repository --------------------------------------------------


def _cars(quick: bool) -> Train:
    x, y = _auto_mpg()
    return lambda group, options: _regress(group, options, x, y, quick)


def _auto_mpg() -> tuple[np.ndarray, np.ndarray]:
    """Return cars' properties, standardized, [392, 6], and miles per gallon, [392]."""
    text = importlib.resources.files("vega_datasets").joinpath("_data/cars.json").read_text()
    names = ("Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration")
    table = [
        [*(car[name] for name in names), int(car["Year"][:4]), car["Miles_per_Gallon"]]
        for car in json.loads(text)
        if car["Horsepower"] is not None and car["Miles_per_Gallon"] is not None
    ]
    values = np.array(table, np.float32)
    values[:, :-1] = (values[:, :-1] - values[:, :-1].mean(axis=0)) / values[:, :-1].std(axis=0)
    return values[:, :-1], values[:, -1]


def _regress(
    group: Communicator, options: dict[str, Any], x: np.ndarray, y: np.ndarray, quick: bool
) -> Quality:
    """Cross-validate, five folds of several orders; each car is tested once in each."""
    orders, epochs = (1, 1) if quick else (3, 20)
    found = []
    for order in range(orders):
        fold = np.random.default_rng(order).permutation(len(x)) % 5
        for test in range(1 if quick else 5):
            found.append(_fit(group, options, x, y, fold == test, epochs))
    z, deviation = np.concatenate(found, axis=1)
    nll = np.mean(z**2 / 2 + np.log(np.sqrt(2 * np.pi) * deviation))
    levels = np.arange(1, 20) / 20
    bounds = [NormalDist().inv_cdf((1 + level) / 2) for level in levels]
    coverage = [np.mean(np.abs(z) <= bound) for bound in bounds]
    return Quality(float(nll), 100 * float(np.mean(np.abs(coverage - levels))))


def _fit(
    group: Communicator,
    options: dict[str, Any],
    x: np.ndarray,
    y: np.ndarray,
    test: np.ndarray,
    epochs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for the cars to test on, errors in standard deviations, and these."""
    centre, scale = y[~test].mean(), y[~test].std()
    inputs, target = x[~test], ((y[~test] - centre) / scale).astype(np.float32)
    pytagi.manual_seed(1)
    network = Sequential(Linear(x.shape[1], 50), ReLU(), Linear(50, 1))
    updater = OutputUpdater("cpu")
    with DDPSequential(network, communicator=group, compute="torch", **options) as model:
        model.set_threads(1)
        sampler = DistributedSampler(inputs, group.size, group.rank)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for share in sampler.batches(8):
                model(inputs[share])
                noise = np.full(len(share), NOISE**2, np.float32)
                updater.update(
                    model.output_z_buffer, target[share], noise, model.input_delta_z_buffer
                )
                model.backward()
                model.step()
        if "sync_every" in options:
            model.merge()
        mean, variance = model(x[test])
    deviation = scale * np.sqrt(variance + NOISE**2)
    return (y[test] - (centre + scale * mean)) / deviation, deviation


SETS: list[tuple[str, Callable[[bool], Train], float | None]] = [
    ("Fashion-MNIST, batch 32", partial(_images, batch=32), 1 / WORSE),
    # For comparison: 2048 images between two merges are too many for a network that knows little.
    ("Fashion-MNIST, batch 256", partial(_images, batch=256), None),
    ("Auto MPG, batch 8", _cars, 1 / WORSE),
]
