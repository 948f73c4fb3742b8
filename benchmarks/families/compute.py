"""Training steps of one process, computed by torch; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pytagi.nn import Sequential
from torch import nn

from benchmarks.harness import networks, sgd
from benchmarks.harness.measure import Contender, Row, measure
from benchmarks.harness.work import data, trainer
from tagi_ddp import Communicator, DDPSequential, accelerate

THREADS = (1, 2)
SGD_TARGET = 1 / 3


@dataclass(frozen=True)
class Case:
    """A network, and how often what is measured; the engine can take more than a minute a step."""

    name: str
    network: Callable[[int], Sequential]
    peer: Callable[[int], nn.Module]
    width: int  # what both of them take
    inputs: int
    batch: int
    target: float | None  # against the engine
    calls: int  # of a step in a sample, ours and SGD's
    engine_rounds: int
    sgd_rounds: int


MLP = Case("MLP", networks.mlp, sgd.mlp, 128, 784, 256, 15, 5, 21, 31)
CNN = Case("CNN", networks.cnn, sgd.cnn, 16, 784, 256, 20, 1, 3, 15)
RESNET18 = Case("ResNet-18", networks.resnet18, sgd.resnet18, 64, 3072, 16, 20, 1, 1, 7)
# Too small for torch: the engine is through with it before torch has called its kernels.
SMALL = Case("small MLP", networks.small, sgd.small, 50, 13, 10, None, 20, 101, 31)
_TOYS = (
    Case("MLP", networks.mlp, sgd.mlp, 16, 784, 2, 15, 1, 1, 1),
    Case("CNN", networks.cnn, sgd.cnn, 2, 784, 2, 20, 1, 1, 1),
    Case("ResNet-18", networks.resnet18, sgd.resnet18, 2, 3072, 2, 20, 1, 1, 1),
    Case("small MLP", networks.small, sgd.small, 2, 13, 2, None, 1, 1, 1),
)
TOYS = {case.name: case for case in _TOYS}


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(e) against the engine's kernels, (f) against torch's own SGD on the same layers.

    All do whole steps: forward, backward and what changes the parameters.
    """
    cases = TOYS.values() if quick else (MLP, CNN, RESNET18, SMALL)
    return [row for case in cases for row in _compare(communicator, case)]


def _compare(communicator: Communicator, case: Case) -> list[Row]:
    ours = accelerate(case.network(case.width), compute="torch")
    engine = accelerate(case.network(case.width), compute="engine")
    _require_same_step(case, ours, engine)
    samples, labels = data(case.inputs, case.batch)
    train = trainer(ours, samples, labels)
    train_engine = Contender("engine", trainer(engine, samples, labels))
    peer = case.peer(case.width)
    train_sgd = sgd.trainer(peer, torch.from_numpy(samples), torch.from_numpy(labels))

    found = []
    for threads in THREADS:
        engine.set_threads(threads)
        ours.set_threads(threads)  # and SGD's
        train()
        name = f"{case.name}, batch {case.batch}, {threads} thread{'s' * (threads > 1)}"
        # The engine, slow as it is, has had its first step; one more would add minutes.
        contenders = [Contender("ours", train, calls=5), train_engine]
        figures = measure(communicator, contenders, case.engine_rounds, warm_up=False)
        found.append(
            Row(
                f"{name}, against the engine ({case.engine_rounds} x)",
                figures["ours"].in_unit(1e3),
                figures["engine"].in_unit(1e3),
                "ms",
                case.target,
            )
        )
        contenders = [
            Contender("ours", train, calls=case.calls),
            Contender("sgd", train_sgd, calls=case.calls),
        ]
        figures = measure(communicator, contenders, case.sgd_rounds)
        found.append(
            Row(
                f"{name}, against torch's SGD ({case.sgd_rounds} x)",
                figures["ours"].in_unit(1e3),
                figures["sgd"].in_unit(1e3),
                "ms",
                SGD_TARGET,
            )
        )
    return found


def _require_same_step(case: Case, ours: DDPSequential, engine: DDPSequential) -> None:
    """Take a step of both on a batch that the engine is soon through with, and compare."""
    samples, labels = data(case.inputs, 2)
    for model in (ours, engine):
        trainer(model, samples, labels)()
    networks.require_equal(ours, engine, case.network(case.width))
