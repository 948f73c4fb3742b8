"""Rules for merging the posteriors of ranks whose data are not alike; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families.calibration import Quality, rate_labels
from benchmarks.families.merging import LIMIT, SIGMA_V, mlp
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import CLASSES, TREE, ImageTask
from examples.images import ImageData, load_images
from tagi_ddp import Communicator, DDPSequential
from tagi_ddp._backend import AdaptiveSum
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.update.exchange import Exchange, Setting

RANKS, LOCAL, EVERY, EPOCHS = 8, 32, 16, 2  # emulated; samples of a local step; steps; of all data
SKEWS = (0.1, 0.5, 1.0)  # Dirichlet's parameter: the smaller, the fewer labels has a rank
Merge = Callable[[np.ndarray, np.ndarray], np.ndarray]


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(p) 8 emulated ranks with label-skewed shards: each rule, against one process on all data.

    A class's images are dealt to the ranks in parts drawn from Dirichlet's distribution. The others
    are rules of the literature on merging Gaussians, by their formulas.
    """
    try:
        data = load_images("digits", limit=256) if quick else load_images("fashion-mnist")
    except (FileNotFoundError, ImportError) as error:
        return [Row("shards", Missing(str(error)), Missing(str(error)), "", None)]
    skews = SKEWS[:1] if quick else SKEWS
    cases = [(skew, name) for skew in skews for name in ["one process", *RULES]]
    mine = {case: _train(data, *case) for case in cases[communicator.rank :: communicator.size]}
    communicator.barrier(timeout=LIMIT)
    told = [[*case, *vars(quality).values()] for case, quality in mine.items()]
    found = {
        (skew, name): Quality(*values)
        for part in all_gather_object(communicator, told)
        for skew, name, *values in part
    }
    return [
        Row(
            f"{what}, Dirichlet {skew:g}, {name}",
            Figure.single(ours),
            Figure.single(other),
            unit,
            None,
        )
        for skew, name in cases
        if name in RULES
        for what, unit, ours, other in (
            ("likelihood", "nats", found[skew, name].nll, found[skew, "one process"].nll),
            (
                "calibration",
                "%",
                found[skew, name].calibration,
                found[skew, "one process"].calibration,
            ),
            ("error", "%", found[skew, name].error, found[skew, "one process"].error),
        )
    ]


def _train(data: ImageData, skew: float, name: str) -> Quality:
    task = ImageTask(data, SIGMA_V)
    network = mlp(data.side, TREE.outputs)
    alone = SingleCommunicator()
    with DDPSequential(network, communicator=alone, average=False, compute="torch") as model:
        model.set_threads(1)
        replica = model._local.replica
        prior = replica.zeros()
        replica.parameters.read_posterior(prior)
        if name == "one process":
            samples = _forever([np.arange(len(data.y_train))])
            for _ in range(EPOCHS * len(data.y_train) // (RANKS * LOCAL)):
                task.step(model, samples(0, RANKS * LOCAL))
            return rate_labels(model, data)
        if name == "agreement":
            model._ranks.exchange = _OneOfMany(
                Setting(alone, replica, average=False, rollback=model._local.rollback)
            )
        samples, merge = _forever(_shards(data.y_train, skew)), RULES[name](replica)
        for _ in range(max(1, EPOCHS * len(data.y_train) // (RANKS * LOCAL * EVERY))):
            posteriors = np.empty((RANKS, len(prior)), np.float32)
            for rank, posterior in enumerate(posteriors):
                replica.parameters.write_posterior(prior)
                replica.updated()
                for _ in range(EVERY):
                    task.step(model, samples(rank, LOCAL))
                replica.parameters.read_posterior(posterior)
            prior = merge(prior, posteriors)
        replica.parameters.write_posterior(prior)
        replica.updated()
        return rate_labels(model, data)


class _OneOfMany(Exchange):
    """Steps as a rank does that is to merge by agreement."""

    def __call__(self, samples: int, finished: bool = False) -> bool:
        self._replica.step_alone(samples, RANKS)
        return False


def _shards(labels: np.ndarray, skew: float) -> list[np.ndarray]:
    """Deal each class's samples to the ranks, in parts drawn from Dirichlet's distribution."""
    rng = np.random.default_rng(0)
    shards: list[list[int]] = [[] for _ in range(RANKS)]
    for label in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(rng.dirichlet([skew] * RANKS))[:-1] * len(members)
        for shard, part in zip(shards, np.split(members, ends.astype(int)), strict=True):
            shard += part.tolist()
    return [np.array(shard or [0]) for shard in shards]


def _forever(shards: list[np.ndarray]) -> Callable[[int, int], np.ndarray]:
    """Return what gives the next samples of a shard, shuffled again whenever all were given."""
    rng = np.random.default_rng(1)
    left: list[np.ndarray] = [np.empty(0, int) for _ in shards]

    def take(index: int, count: int) -> np.ndarray:
        while len(left[index]) < count:
            left[index] = np.concatenate([left[index], rng.permutation(shards[index])])
        taken, left[index] = np.split(left[index], [count])
        return taken

    return take


# --- rules: from the prior and the ranks' posteriors, [means | variances], to one ----------------


def _by_changes(replica: Any, adaptive: bool) -> Merge:
    """Merge as DDPSequential does."""
    parameters, damping = replica.parameters, AdaptiveSum(replica.parameters)

    def merge(prior: np.ndarray, posteriors: np.ndarray) -> np.ndarray:
        total, descriptions = np.zeros_like(prior), np.zeros(damping.described, np.float32)
        for posterior in posteriors:
            change, description = np.empty_like(prior), np.empty_like(descriptions)
            parameters.change_since(posterior, prior, change)
            damping.describe(change, prior, EVERY, description)
            total += change
            descriptions += description
        if adaptive:
            damping.damp(total, prior, descriptions, RANKS)
        merged = prior.copy()
        parameters.add_change(merged, prior, total)
        return merged

    return merge


def _by_moments(
    replica: Any, formula: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> Merge:
    def merge(prior: np.ndarray, posteriors: np.ndarray) -> np.ndarray:
        means, variances = np.split(posteriors.astype(np.float64), 2, axis=1)
        return np.concatenate(formula(means, variances)).astype(np.float32)

    return merge


def _average(means: np.ndarray, variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average both."""
    return means.mean(0), variances.mean(0)


def _average_of_variables(
    means: np.ndarray, variances: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Average the weights as independent random variables."""
    return means.mean(0), variances.mean(0) / RANKS


def _linear_pool(means: np.ndarray, variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take the moments of the mixture."""
    return means.mean(0), variances.mean(0) + means.var(0)


def _logarithmic_pool(means: np.ndarray, variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take the geometric mean of densities, as federated IVON does: precisions are averaged."""
    precision = (1 / variances).mean(0)
    return (means / variances).mean(0) / precision, 1 / precision


def _conflation(means: np.ndarray, variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Multiply the densities, the prior in each of them: precisions are added."""
    mean, variance = _logarithmic_pool(means, variances)
    return mean, variance / RANKS


RULES: dict[str, Callable[[Any], Merge]] = {
    "agreement": partial(_by_changes, adaptive=True),
    "bayes": partial(_by_changes, adaptive=False),
    "mean": partial(_by_moments, formula=_average),
    "mean of variables": partial(_by_moments, formula=_average_of_variables),
    "linear pool": partial(_by_moments, formula=_linear_pool),
    "logarithmic pool": partial(_by_moments, formula=_logarithmic_pool),
    "conflation": partial(_by_moments, formula=_conflation),
}
