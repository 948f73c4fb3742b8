"""Reductions while backward goes on, on one host, where they are off; see `rows`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.measure import Contender, Missing, Row, measure
from benchmarks.harness.networks import INPUTS, mlp, require_equal
from benchmarks.harness.peers import open_gloo, open_mpi
from benchmarks.harness.work import data, trainer
from tagi_ddp import Communicator, DDPSequential, init
from tagi_ddp.communicators import as_communicator
from tagi_ddp.update.exchange import Bucket, Overlapped, Setting

BATCH = 256  # per rank


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(i) parts that are reduced during backward, against one bucket at the step."""
    hidden, batch, rounds = (768, 2, 1) if quick else (2944, BATCH, 15)
    found = []
    gloo = open_gloo(communicator, scratch)
    assert not isinstance(gloo, Missing)  # the torch that computes here has it
    with as_communicator(gloo.group.WORLD) as group:
        found.append(_compare(group, hidden, batch, rounds))
    gloo.destroy_process_group()
    if not isinstance(open_mpi(), Missing):
        with init("mpi") as group:
            found.append(_compare(group, hidden, batch, rounds))
    return found


def _compare(communicator: Communicator, hidden: int, batch: int, rounds: int) -> Row:
    samples, labels = data(INPUTS, batch * communicator.size)
    part = slice(communicator.rank * batch, (communicator.rank + 1) * batch)
    overlapped, plain = (
        DDPSequential(mlp(hidden), average=False, communicator=communicator, compute="torch")
        for _ in range(2)
    )
    for model, kind, more in (
        (overlapped, Overlapped, (overlapped.compute.bucket,)),
        (plain, Bucket, ()),
    ):
        setting = Setting(communicator, model._local.replica, False, model.compute.bucket)
        model._ranks.exchange = kind(setting, *more)
    contenders = [
        Contender(name, trainer(model, samples[part], labels[part]))
        for name, model in (("ours", overlapped), ("plain", plain))
    ]
    for contender in contenders:
        contender.run()
    require_equal(overlapped, plain, mlp(hidden))
    figures = {
        name: figure.in_unit(1e3)
        for name, figure in measure(communicator, contenders, rounds).items()
    }
    size = sum(len(layer.mu_w) + len(layer.mu_b) for layer in overlapped.model.layers)
    name = f"training by torch, {communicator.size} ranks over {communicator.backend}"
    return Row(
        f"{name}, {size / 1e6:.2g} M parameters, batch {batch} each, overlap against none",
        figures["ours"],
        figures["plain"],
        "ms",
        None,
    )
