"""Training throughput of 2 ranks, computed by torch; see `rows`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.families.compute import CNN, MLP, TOYS, Case
from benchmarks.harness.measure import Contender, Row, measure
from benchmarks.harness.networks import require_equal
from benchmarks.harness.work import data, trainer
from tagi_ddp import Communicator, DDPSequential, accelerate


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(g) ranks of 1 thread against 1 rank of 1 thread, on the same global batch.

    And, for information, against as many ranks that do not exchange anything: what the machine's
    cores can give.
    """
    toys = TOYS[MLP.name], TOYS[CNN.name]
    cases = toys if quick else (replace(MLP, batch=1024), CNN)
    return [row for case in cases for row in _compare(communicator, case)]


def _compare(communicator: Communicator, case: Case) -> list[Row]:
    samples, labels = data(case.inputs, case.batch)
    share = case.batch // communicator.size
    part = slice(communicator.rank * share, (communicator.rank + 1) * share)
    # As in `training`, the first network of a process, slower than later ones, is not measured.
    first = accelerate(case.network(case.width), compute="torch")
    first.set_threads(1)
    train_first = trainer(first, samples[part], labels[part])
    for _ in range(case.calls):
        train_first()
    group = DDPSequential(
        case.network(case.width), average=False, communicator=communicator, compute="torch"
    )
    single, apart = (accelerate(case.network(case.width), compute="torch") for _ in range(2))
    for model in (single, apart, group):
        model.set_threads(1)
    train_group = trainer(group, samples[part], labels[part])
    train_single = trainer(single, samples, labels)
    train_apart = trainer(apart, samples[part], labels[part])
    train_group()
    train_single()
    require_equal(group, single, case.network(case.width))
    contenders = [
        Contender("ours", train_group, calls=case.calls),
        Contender("1 rank", train_single, calls=case.calls, alone=True),
        Contender("no exchange", train_apart, calls=case.calls),
    ]
    figures = measure(communicator, contenders, case.sgd_rounds)
    return [
        Row(
            f"training by torch, {communicator.size} ranks, {case.name}, batch {case.batch}, "
            f"against {other}",
            figures["ours"].rate(case.batch),
            figures[other].rate(case.batch),
            "samples/s",
            target,
        )
        for other, target in (("1 rank", 1.8), ("no exchange", None))
    ]
