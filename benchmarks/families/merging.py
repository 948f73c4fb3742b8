"""The quality of merged posteriors, by ranks, steps between two merges and batch; see `rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytagi
from pytagi.nn import Linear, ReLU, Sequential

from benchmarks.families.calibration import Quality, rate_labels
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import TREE, ImageTask
from examples import networks
from examples.images import ImageData, load_images
from tagi_ddp import Communicator, DDPSequential, DistributedSampler
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.single import SingleCommunicator

LIMIT = 3600.0  # seconds, for the longest training
SIGMA_V = 0.5
SEED = 1
# How many times one process's negative log-likelihood ours may be, after so many epochs: up to 8
# steps between two merges, and more.
WORSE = {2: (1.05, 1.15), 8: (1.02, 1.05)}
LARGE, LOCAL = 4096, 32  # a global batch, and the local ones of a rank's share
ORDERS = (0, 1, 2)  # where figures of one order of the data differ as much as is asked for


@dataclass(frozen=True)
class Case:
    """A training: so many ranks that merge after ``every`` steps on shares of a batch."""

    network: str
    batch: int
    ranks: int = 1
    every: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    local: int = 0  # samples of a local batch; 0: a share is one step
    orders: tuple[int, ...] = (0,)  # of the data: the sampler's seeds

    def __str__(self) -> str:
        """Return the row's name."""
        words = [f"{self.network}, batch {self.batch}, {self.ranks} ranks, {self.every} steps"]
        words += [f"local batches of {self.local}"] * bool(self.local)
        return ", ".join([*words, *map(str, self.options.values())])


Found = dict[int, Quality]  # by epochs


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(o) 2 to 16 ranks that merge every 1 to 32 steps, against one process with the same batch.

    Negative log-likelihood, calibration error and test error of Fashion-MNIST, by an MLP; medians
    where there are several orders of the data. And a large global batch in local ones, against one
    process with a small batch; and rules and bits.
    """
    return measure_cases(communicator, quick, _cases(quick))


def measure_cases(communicator: Communicator, quick: bool, cases: Iterable[Case]) -> list[Row]:
    """Return the rows of the cases for which there are ranks."""
    try:
        data = load_images("digits", limit=64) if quick else load_images("fashion-mnist")
    except (FileNotFoundError, ImportError) as error:
        return [Row("merging", Missing(str(error)), Missing(str(error)), "", None)]
    train = partial(_train, data=data, epochs=(1,) if quick else (2, 8))
    cases = [case for case in cases if case.ranks <= communicator.size]
    alone = _alone(communicator, cases, train)
    found: list[Row] = []
    for case in cases:
        part = communicator.split(0 if communicator.rank < case.ranks else None)
        if part is not None:
            with part:
                ours = [train(case, order, part) for order in case.orders]
            if communicator.rank == 0:
                print(f"{case}: {ours}", flush=True)  # the next ones take minutes
                batch = _compared_with(case)
                found += _rows(case, ours, [alone[case.network, batch, o] for o in case.orders])
        communicator.barrier(timeout=LIMIT)
    return found


def _cases(quick: bool) -> Iterator[Case]:
    if quick:
        yield Case("MLP", 64, 4, 2)
        return
    for batch in (256, 1024):
        for ranks in (2, 4, 8, 16):
            for every in (1, 8, 32):
                yield Case("MLP", batch, ranks, every)
    yield Case("MLP", 256, 4, 8, {"merge": "bayes"})
    for compress in ("bf16", "int8"):
        yield Case("MLP", 256, 4, 32, {"compress": compress})
    yield Case("MLP", LARGE, 16, 1, {}, LOCAL, ORDERS)


def _compared_with(case: Case) -> int:
    """Return the batch of the one process that a case is compared with."""
    return 256 if case.local else case.batch


def _alone(
    communicator: Communicator, cases: list[Case], train: Callable[..., Found]
) -> dict[tuple[str, int, int], Found]:
    """Train what the cases are compared with, each on a rank of its own."""
    compared = [(case.network, _compared_with(case), case.orders) for case in cases]
    keys = sorted({(kind, batch, order) for kind, batch, orders in compared for order in orders})
    mine = {}
    for network, batch, order in keys[communicator.rank :: communicator.size]:
        mine[network, batch, order] = train(Case(network, batch), order, SingleCommunicator())
    communicator.barrier(timeout=LIMIT)
    told = [
        [[*key], [[epochs, *vars(quality).values()] for epochs, quality in found.items()]]
        for key, found in mine.items()
    ]
    return {
        (network, batch, order): {epochs: Quality(*values) for epochs, *values in found}
        for part in all_gather_object(communicator, told)
        for (network, batch, order), found in part
    }


def _train(
    case: Case, order: int, group: Communicator, data: ImageData, epochs: tuple[int, ...]
) -> Found:
    task = ImageTask(data, SIGMA_V)
    options: dict[str, Any] = {"average": False}
    if case.ranks > 1:
        options = {"reduction": "precision", "sync_every": case.every, **case.options}
    network = _network(case.network, data.side, TREE.outputs)
    sampler = DistributedSampler(data.x_train, group.size, group.rank, seed=order)
    found = {}
    with DDPSequential(network, communicator=group, compute="torch", **options) as model:
        model.set_threads(1)
        for epoch in range(epochs[-1]):
            sampler.set_epoch(epoch)
            for share in sampler.batches(case.batch):
                if case.local:
                    for part in model.local_batches(share, case.local):
                        task.step(model, part)
                else:
                    task.step(model, share)
            if epoch + 1 in epochs:
                if case.ranks > 1:
                    model.merge()
                if group.rank == 0:
                    found[epoch + 1] = rate_labels(model, data)
                group.barrier(timeout=LIMIT)
    return found


def _network(kind: str, side: int, outputs: int) -> Sequential:
    return mlp(side, outputs) if kind == "MLP" else cnn(side, outputs)


def cnn(side: int, outputs: int) -> Sequential:
    """Return a network of two convolutions."""
    pytagi.manual_seed(SEED)
    return networks.cnn(side, outputs)


def mlp(side: int, outputs: int) -> Sequential:
    """Return a network of two hidden layers."""
    pytagi.manual_seed(SEED)
    return Sequential(
        Linear(side * side, 128), ReLU(), Linear(128, 128), ReLU(), Linear(128, outputs)
    )


def _rows(case: Case, ours: list[Found], alone: list[Found]) -> Iterator[Row]:
    """Return the medians over the orders of the data."""
    for epochs in ours[0]:
        name = f"{case}, {epochs} epochs"
        worse = WORSE[epochs][case.every > 8] if epochs in WORSE else None
        target = 1 / worse if worse and not (case.options or case.local) else None
        for kind, unit, least in (
            ("likelihood", "nats", target),
            ("calibration", "%", None),
            ("error", "%", None),
        ):
            attribute = "nll" if kind == "likelihood" else kind
            mine, theirs = (
                Figure.of([getattr(found[epochs], attribute) for found in orders])
                for orders in (ours, alone)
            )
            yield Row(f"{kind}, {name}", mine, theirs, unit, least)
