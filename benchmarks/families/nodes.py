"""Merging posteriors over a slow link between two emulated nodes; see `rows`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytagi
from pytagi.nn import Linear, ReLU, Sequential

from benchmarks.families.merging import cnn
from benchmarks.harness.emulated import MBIT, NotPossible, bytes_sent, two_nodes
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import TREE, ImageTask
from examples.images import ImageData, load_images
from tagi_ddp import (
    Communicator,
    DDPSequential,
    DistributedSampler,
    accelerate,
    reduce_metrics,
)
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.optim import SyncSchedule
from tagi_ddp.plan import Cluster, Training, measure_link, predict

NAME = f"2 emulated nodes, {MBIT} Mbit/s, Fashion-MNIST, MLP"
EPOCHS, BATCH, HIDDEN = 6, 512, 256
FAR = (20.0, 50.0)  # Mbit/s, and milliseconds of delay in each direction
FAR_BATCH, FAR_EVERY = 1024, 32
# Of the asynchronous scheme; its loss is taken to fall, as the simulator takes it.
SCHEDULE = {"warmup_epochs": 1, "cooldown_epochs": 1, "max_global_skips": 8}


@dataclass
class Contender:
    """A replica, and the seconds that its epochs took."""

    model: DDPSequential
    schedule: SyncSchedule | None
    seconds: float = 0.0


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(j) asynchronous merging against the sum of deltas at every step: the same epochs.

    And what `tagi_ddp.plan` predicts for both, from the link as measured by all_reduces, and from
    the time of a step without communication.
    """
    try:
        data = load_images("digits" if quick else "fashion-mnist")
    except FileNotFoundError as error:
        return [_missing(error)]
    epochs, batch = (3, 256) if quick else (EPOCHS, BATCH)
    found: list[Row] = []
    try:
        with two_nodes(communicator) as network:
            found += _measure(communicator, network, data, epochs, batch)
        with two_nodes(communicator, *FAR) as network:
            found += _measure_far(communicator, network, data, quick)
    except NotPossible as error:
        found.append(_missing(error))
    return found


def _measure_far(
    communicator: Communicator, network: Communicator, data: ImageData, quick: bool
) -> list[Row]:
    """Merge every 32 steps in 8 bits; how much of the time is computing, and what travels."""
    batch, steps, sums = (64, 32, 2) if quick else (FAR_BATCH, 10 * FAR_EVERY, 8)
    outputs = TREE.outputs
    task = ImageTask(data)
    shares = [
        share
        for epoch in range(1 + (steps + sums) * batch // len(data.x_train))
        for share in _sampler(communicator, data.x_train, epoch).batches(batch)
        if len(share) == batch // 2
    ]
    merging = {
        "reduction": "precision",
        "sync_every": FAR_EVERY,
        "node_size": 1,
        "compress": "int8",
    }
    alone = accelerate(cnn(data.side, outputs), compute="torch")
    summing = _wrap_cnn(network, data.side, average=False)
    merged = _wrap_cnn(network, data.side, **merging)
    for model in (alone, summing, merged):
        model.set_threads(1)
        task.step(model, shares[0])  # the first one is slower
    merged.merge()
    merged._ranks.exchange._all_shares = 8 * FAR_EVERY  # as later, when merges are seldom

    def measure(model: DDPSequential, count: int) -> tuple[float, float]:
        """Return the seconds, and the bytes that left this node, of a step."""
        communicator.barrier(timeout=600)
        before, start = bytes_sent(), time.perf_counter()
        for share in shares[:count]:
            task.step(model, share)
        return (time.perf_counter() - start) / count, (bytes_sent() - before) / count

    step, _ = measure(alone, min(steps, 4 * FAR_EVERY))
    sum_step, sum_bytes = measure(summing, sums)
    merge_step, merge_bytes = measure(merged, steps)
    communicator.barrier(timeout=600)
    for model in (summing, merged):
        model.close()
    where = f"2 emulated nodes, {FAR[0]:g} Mbit/s, {FAR[1]:g} ms, Fashion-MNIST, CNN, batch {batch}"
    rows_of = (
        (
            f"a step: merges in 8 bits every {FAR_EVERY} steps against the sum",
            1e3 * merge_step,
            1e3 * sum_step,
            "ms",
            None,
        ),
        ("of the time is computing", 100 * step / merge_step, 100 * step / sum_step, "%", None),
        ("sent by a node for a step", merge_bytes / 1e3, sum_bytes / 1e3, "kB", 100.0),
    )
    return [
        Row(f"{where}, {what}", Figure.single(ours), Figure.single(other), unit, target)
        for what, ours, other, unit, target in rows_of
    ]


def _measure(
    communicator: Communicator, network: Communicator, data: ImageData, epochs: int, batch: int
) -> list[Row]:
    schedule = SyncSchedule(epochs, stability_level=0.0, **SCHEDULE)
    merging = {"reduction": "precision", "sync_every": schedule, "node_size": 1}
    contenders = {
        "asynchronous": Contender(_wrap(network, data.side, **merging), schedule),
        "sum": Contender(_wrap(network, data.side, average=False), None),
    }
    size = 8 * sum(  # of the deltas, in bytes
        len(layer.mu_w) + len(layer.mu_b) for layer in contenders["sum"].model.model.layers
    )
    # Of what will be sent: TCP's rate on such a link depends on the size.
    link = measure_link(network, [1 << 10, size // 2, size, 2 * size])
    batches = len(data.x_train) // batch
    alone = Contender(accelerate(_network(data.side), compute="torch"), None)
    alone.model.set_threads(1)
    for part in (5, batches // 4):  # the first batches are slower
        alone.seconds = 0.0
        _train_epoch(communicator, alone, data, 0, batch, most=part)
    step = alone.seconds / max(1, batches // 4)
    for epoch in range(epochs):
        for contender in contenders.values():  # in turn, epoch by epoch
            _train_epoch(communicator, contender, data, epoch, batch)
    errors = {name: _test(communicator, each.model, data) for name, each in contenders.items()}
    for contender in contenders.values():
        contender.model.check_replicas()
    training = Training(step, size / 8, batches=batches, epochs=epochs, **SCHEDULE)
    predicted = predict(training, Cluster(link, link, 1), 2)
    ours, other = contenders["asynchronous"].seconds, contenders["sum"].seconds
    return [
        Row(
            f"{NAME}, {epochs} epochs, asynchronous merging against the sum",
            Figure.single(ours),
            Figure.single(other),
            "s",
            1 / 0.66,
        ),
        Row(
            f"{NAME}, test error",
            Figure.single(100 * errors["asynchronous"]),
            Figure.single(100 * errors["sum"]),
            "%",
            None,
        ),
        *(
            Row(
                f"{NAME}, {name}, measured against predicted",
                Figure.single(each.seconds),
                Figure.single(predicted[name] * batches * epochs),
                "s",
                None,
            )
            for name, each in contenders.items()
        ),
        Row(
            f"{NAME}, step without communication against sum's",
            Figure.single(1e3 * step),
            Figure.single(1e3 * other / batches / epochs),
            "ms",
            None,
        ),
    ]


def _missing(error: Exception) -> Row:
    return Row("2 emulated nodes", Missing(str(error)), Missing(str(error)), "s", None)


def _wrap(network: Communicator, side: int, **options: object) -> DDPSequential:
    return DDPSequential(_network(side), communicator=network, compute="torch", **options)


def _wrap_cnn(network: Communicator, side: int, **options: object) -> DDPSequential:
    outputs = TREE.outputs
    return DDPSequential(cnn(side, outputs), communicator=network, compute="torch", **options)


def _network(side: int) -> Sequential:
    pytagi.manual_seed(1)
    outputs = TREE.outputs
    return Sequential(
        Linear(side * side, HIDDEN),
        ReLU(),
        Linear(HIDDEN, HIDDEN),
        ReLU(),
        Linear(HIDDEN, outputs),
    )


def _train_epoch(
    communicator: Communicator,
    contender: Contender,
    data: ImageData,
    epoch: int,
    batch: int,
    most: int | None = None,
) -> None:
    """Train on all full batches, or so many at most; add what the slower rank took."""
    model, schedule = contender.model, contender.schedule
    shares = _sampler(communicator, data.x_train, epoch).batches(batch)
    shares = shares[: len(data.x_train) // batch][:most]
    task = ImageTask(data)
    communicator.barrier()
    start, wrong = time.perf_counter(), 0
    if schedule:
        model.begin_epoch(len(shares))
    for share in shares:
        predicted = TREE.probabilities(*task.step(model, share)).argmax(1)
        wrong += np.sum(predicted != data.y_train[share])
    if schedule:
        model.end_epoch(wrong / sum(map(len, shares)))
    contender.seconds += max(all_gather_object(communicator, time.perf_counter() - start))


def _test(communicator: Communicator, model: DDPSequential, data: ImageData) -> float:
    """Return the part of the test images that are not recognized."""
    model.eval()
    shares = DistributedSampler(
        data.x_test, communicator.size, communicator.rank, shuffle=False
    ).batches(500)
    found = [TREE.probabilities(*model(data.x_test[i])).argmax(1) for i in shares]
    wrong = [labels != data.y_test[i] for labels, i in zip(found, shares, strict=True)]
    return reduce_metrics(communicator, sum(map(np.sum, wrong)), sum(map(len, shares)))


def _sampler(communicator: Communicator, samples: np.ndarray, epoch: int) -> DistributedSampler:
    sampler = DistributedSampler(samples, communicator.size, communicator.rank)
    sampler.set_epoch(epoch)
    return sampler
