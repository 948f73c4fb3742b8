"""Trainings of images for the proofs: a setting, its seeds, and its class probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytagi
from pytagi.nn import Sequential

from benchmarks.harness.measure import Figure
from benchmarks.harness.work import TREE
from examples.images import ImageData
from tagi_ddp import Communicator, DDPSequential, DistributedSampler
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.data import ClassScores, class_scores

LIMIT = 3600.0  # seconds, for the longest training


@dataclass(frozen=True)
class Setting:
    """A training of the ranks of a group.

    They sum their deltas or, with ``local``, take their shares of a batch in steps of so many
    samples of their own, and merge after it by the rule ``merge``.
    """

    network: Callable[[], Sequential]
    batch: int
    epochs: int
    sigma_v: float
    local: int = 0
    cap_factor: float | None = None
    merge: str = "agreement"


def train(setting: Setting, data: ImageData, seed: int, group: Communicator) -> DDPSequential:
    """Return the model, which the caller closes; the seed is that of parameters and order."""
    targets, nodes = TREE.decisions(data.y_train)
    pytagi.manual_seed(seed)
    options: dict[str, Any] = {"average": False}
    if setting.local and group.size > 1:
        options = {"reduction": "precision", "merge": setting.merge}
    model = DDPSequential(
        setting.network(), communicator=group, cap_factor=setting.cap_factor, **options
    )
    model.set_threads(1)
    sampler = DistributedSampler(data.x_train, group.size, group.rank, seed=seed)
    for epoch in range(setting.epochs):
        sampler.set_epoch(epoch)
        for share in sampler.batches(setting.batch):
            for part in _parts(model, share, setting.local):
                model.learn(data.x_train[part], targets[part], setting.sigma_v**2, nodes[part])
    if model.reduction == "precision":
        model.merge()
    return model


def _parts(model: DDPSequential, share: Any, local: int) -> Any:
    if not local:
        return [share]
    if model.reduction == "precision":
        return model.local_batches(share, local)
    return np.split(share, range(local, len(share), local))


def probabilities(model: DDPSequential, images: np.ndarray) -> np.ndarray:
    """Return the class probabilities, [images, classes]."""
    parts = [model.predict(part) for part in np.array_split(images, max(1, len(images) // 500))]
    return np.concatenate([TREE.probabilities(*part) for part in parts])


def of_seeds(
    communicator: Communicator, ranks: int, seeds: int, run: Callable[[int, Communicator], Any]
) -> list[Any]:
    """Return ``run(seed, group)`` of rank 0 of a group, by seed; groups share out the seeds."""
    groups = communicator.size // ranks
    number = communicator.rank // ranks
    group = communicator.split(number if number < groups else None)
    own = {}
    if group is not None:
        with group:
            for seed in range(number, seeds, groups):
                found = run(seed, group)
                if group.rank == 0:
                    own[seed] = found
    communicator.barrier(timeout=LIMIT)
    everyone = all_gather_object(communicator, [[seed, own[seed]] for seed in own])
    return [found for _, found in sorted(pair for part in everyone for pair in part)]


def scores_of_seeds(
    communicator: Communicator, ranks: int, seeds: int, setting: Setting, data: ImageData
) -> list[ClassScores]:
    """Return the scores of the test images, by seed."""

    def run(seed: int, group: Communicator) -> list[float]:
        with train(setting, data, seed, group) as model:
            found = list(
                vars(class_scores(probabilities(model, data.x_test), data.y_test)).values()
            )
            group.barrier(timeout=LIMIT)
        return found

    return [ClassScores(*values) for values in of_seeds(communicator, ranks, seeds, run)]


def plural(ranks: int) -> str:
    """Return how rows name so many ranks."""
    return f"{ranks} rank" + "s" * (ranks > 1)


def figure_of(values: Sequence[float]) -> Figure:
    """Return the mean of all seeds, the least and the greatest."""
    return Figure(float(np.mean(values)), float(min(values)), float(max(values)))
