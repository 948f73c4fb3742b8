"""`step` of sharded replicas against that of replicas which each do all the work; see `rows`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.families.steps import BATCH, backward_of
from benchmarks.harness.measure import Contender, Row, measure
from benchmarks.harness.networks import INPUTS, mlp
from tagi_ddp import Communicator, DDPSequential


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(m) the update alone, exchange included, over shared memory."""
    hidden, rounds = (16, 2) if quick else (2944, 21)
    return [_compare(communicator, hidden, rounds)]


def _compare(communicator: Communicator, hidden: int, rounds: int) -> Row:
    models = {
        name: DDPSequential(
            mlp(hidden),
            average=False,
            communicator=communicator,
            compute="torch",
            sharded=name == "ours",
        )
        for name in ("ours", "plain")
    }
    samples = np.random.default_rng(communicator.rank).standard_normal((BATCH, INPUTS), np.float32)
    figures = measure(
        communicator,
        [
            Contender(name, model.step, backward_of(model, samples))
            for name, model in models.items()
        ],
        rounds,
    )
    if len({model.check_replicas() for model in models.values()}) != 1:
        raise RuntimeError("sharded replicas differ from plain ones: the row would mean nothing")
    size = sum(len(layer.mu_w) + len(layer.mu_b) for layer in models["plain"].model.layers)
    return Row(
        f"step of sharded replicas, {communicator.size} ranks, {size / 1e6:.2g} M parameters, "
        "against DDPSequential's",
        figures["ours"].in_unit(1e3),
        figures["plain"].in_unit(1e3),
        "ms",
        1.0,
    )
