"""Errors, likelihoods and calibration on MNIST; see `rows`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mnist import BATCH, CAP_FACTOR, SIGMA_V, network
from networks import cnn
from pytagi.nn import Linear, ReLU, Sequential

from benchmarks.harness.classify import Setting, figure_of, plural, scores_of_seeds
from benchmarks.harness.datasets import images
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import TREE
from tagi_ddp import Communicator

SEEDS, EPOCHS = 5, 3
SMALL_SIGMA_V = {1: 0.2, 16: 0.1}  # by batch


@dataclass(frozen=True)
class Case:
    """A training on so many ranks, its published error, and the error that is asked for, in %."""

    name: str
    setting: Setting
    ranks: int
    published: float
    bar: float


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """Means over seeds [the least, the greatest], against published errors.

    The networks are those of TAGI's authors: cuTAGI's tutorial 4, and smaller ones of one epoch.
    """
    data = images("mnist", 200 if quick else None)
    if isinstance(data, str):
        return [Row("MNIST", Missing(data), Missing(data), "", None)]
    table = []
    for case in _cases(1 if quick else EPOCHS):
        if case.ranks > communicator.size:
            continue
        start = time.perf_counter()
        found = scores_of_seeds(communicator, case.ranks, 2 if quick else SEEDS, case.setting, data)
        seconds = time.perf_counter() - start
        error = figure_of([100 * one.error for one in found])
        published = Figure.single(case.published)
        none = Missing("no figure was published")
        table += [
            Row(f"{case.name}, error", error, published, "%", case.published / case.bar),
            Row(
                f"{case.name}, negative log-likelihood",
                *(figure_of([-one.log_likelihood for one in found]), none, "nats", None),
            ),
            Row(
                f"{case.name}, calibration error",
                *(figure_of([100 * one.calibration_error for one in found]), none, "%", None),
            ),
            Row(f"{case.name}, all seeds", Figure.single(seconds), none, "s", None),
        ]
    return table


def _cases(epochs: int) -> list[Case]:
    wide = Setting(network, BATCH, epochs, SIGMA_V, cap_factor=CAP_FACTOR)
    name = f"MNIST, CNN, {epochs} epochs, "
    cases = [Case(name + plural(ranks), wide, ranks, 0.85, 0.75) for ranks in (1, 2, 4)]
    small = Setting(_cnn, 16, 1, SMALL_SIGMA_V[16], cap_factor=CAP_FACTOR)
    single = Setting(_mlp, 1, 1, SMALL_SIGMA_V[1])
    return [
        *cases,
        Case("MNIST, small CNN, batch 16, 1 epoch", small, 1, 2.07, 1.1),
        Case("MNIST, MLP 100-100, batch 1, 1 epoch", single, 1, 3.71, 3.5),
    ]


def _cnn() -> Sequential:
    return cnn(28, TREE.outputs)


def _mlp() -> Sequential:
    layers = [Linear(784, 100), ReLU(), Linear(100, 100), ReLU()]
    return Sequential(*layers, Linear(100, TREE.outputs))
