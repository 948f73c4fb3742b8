"""The pause of training for a checkpoint; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.families.steps import backward_of
from benchmarks.harness.measure import Contender, Row, measure
from benchmarks.harness.networks import INPUTS, mlp
from tagi_ddp import Communicator, DDPSequential
from tagi_ddp.checkpoint import Checkpoints

BATCH = 16  # per rank: a step of few samples is the shortest pause to be measured by


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """A save by all ranks against a training step, and against what writes in the foreground."""
    hidden, rounds = (16, 2) if quick else (2944, 9)
    return [
        *_pauses(communicator, "sums", hidden, rounds, scratch),
        *_pauses(communicator, "merges", hidden, rounds, scratch),
    ]


def _pauses(
    communicator: Communicator, kind: str, hidden: int, rounds: int, scratch: Path
) -> list[Row]:
    samples = np.random.default_rng(communicator.rank).standard_normal((BATCH, INPUTS), np.float32)
    reduction = "sum" if kind == "sums" else "precision"
    model = DDPSequential(
        mlp(hidden),
        reduction=reduction,  # type: ignore[arg-type]
        communicator=communicator,
        **({} if kind == "sums" else {"sync_every": 4}),
    )
    plain = mlp(hidden)
    backward = backward_of(model, samples)

    def step() -> None:
        backward()
        model.step()

    step()
    arrays = model.run_state()["parameters"].items()
    tensors = {name: torch.from_numpy(array) for name, array in arrays}
    folder = scratch / kind
    with Checkpoints(folder, model, keep=1) as checkpoints:
        contenders = [
            Contender("save", lambda: checkpoints.save(1), checkpoints.wait),
            Contender("step", step, checkpoints.wait),
            Contender("beside", step, lambda: checkpoints.save(1)),
            Contender("whole", _both(lambda: checkpoints.save(1), checkpoints.wait)),
            Contender("pytagi", lambda: plain.save(str(scratch / "pytagi")), alone=True),
            Contender("torch", lambda: torch.save(tensors, scratch / "torch"), alone=True),
        ]
        found = {
            name: figure.in_unit(1e3)
            for name, figure in measure(communicator, contenders, rounds).items()
        }
    million = sum(len(layer.mu_w) + len(layer.mu_b) for layer in plain.layers) / 1e6
    name = f"{kind}, {communicator.size} ranks, {million:.2g} M parameters:"
    return [
        Row(f"{name} pause, against a step", found["save"], found["step"], "ms", 1.0),
        Row(f"{name} pause, against pytagi's save", found["save"], found["pytagi"], "ms", 1.0),
        Row(f"{name} pause, against torch.save", found["save"], found["torch"], "ms", 1.0),
        Row(f"{name} step beside the writing", found["beside"], found["step"], "ms", None),
        Row(f"{name} until it is whole", found["whole"], found["torch"], "ms", None),
    ]


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
