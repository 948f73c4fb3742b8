"""`step` of 2 ranks over shared memory, exchange included; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pytagi.nn import OutputUpdater, Sequential

from benchmarks.harness.measure import Contender, Missing, Row, measure
from benchmarks.harness.networks import INPUTS, OUTPUTS, mlp, require_equal
from benchmarks.harness.peers import open_mpi
from tagi_ddp import Communicator, DDPSequential

BATCH = 16  # per rank; a step takes as long after any
DELTAS = ("delta_mu_w", "delta_var_w", "delta_mu_b", "delta_var_b")


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(a) against what the public interfaces offer; (b) against the engine's step, 1 process."""
    mpi = open_mpi()
    if quick:
        return _compare(communicator, mpi, hidden=16, rounds=2)
    return [
        *_compare(communicator, mpi, hidden=256, rounds=31),
        *_compare(communicator, mpi, hidden=2944, rounds=9),
    ]


def _compare(communicator: Communicator, mpi: Any | Missing, hidden: int, rounds: int) -> list[Row]:
    # Equal deltas come from equal samples, of which each rank has its own.
    samples = np.random.default_rng(communicator.rank).standard_normal((BATCH, INPUTS), np.float32)
    ours = DDPSequential(mlp(hidden), average=False, communicator=communicator, compute="engine")
    plain = mlp(hidden)
    contenders = [
        Contender("ours", ours.step, backward_of(ours, samples)),
        Contender("pytagi", plain.step, backward_of(plain, samples), alone=True),
    ]
    if not isinstance(mpi, Missing):
        public = mlp(hidden)
        public_step = _public_step(public, mpi)
        contenders.append(Contender("public", public_step, backward_of(public, samples)))
        for contender in (contenders[0], contenders[2]):
            contender.prepare()
            contender.run()
        require_equal(ours, public, mlp(hidden))
    figures = {
        name: figure.in_unit(1e3)
        for name, figure in measure(communicator, contenders, rounds).items()
    }
    size = sum(len(layer.mu_w) + len(layer.mu_b) for layer in plain.layers)
    name = f"step, {communicator.size} ranks, {size / 1e6:.2g} M parameters, against"
    return [
        Row(
            f"{name} getters + mpi4py + setters",
            figures["ours"],
            mpi if isinstance(mpi, Missing) else figures["public"],
            "ms",
            60,
        ),
        Row(f"{name} pytagi's in 1 process", figures["ours"], figures["pytagi"], "ms", 2.5),
    ]


def backward_of(model: Sequential | DDPSequential, samples: np.ndarray) -> Callable[[], None]:
    """Return what leaves new deltas in ``model``."""
    updater = OutputUpdater("cpu")
    targets = np.ones(BATCH * OUTPUTS, np.float32)

    def backward() -> None:
        model(samples)
        updater.update(model.output_z_buffer, targets, targets, model.input_delta_z_buffer)
        model.backward()

    return backward


def _public_step(model: Sequential, mpi: Any) -> Callable[[], None]:
    """Return the step of all ranks that pytagi and mpi4py alone can do."""
    layers = [layer for layer in model.layers if layer.mu_w]

    def step() -> None:
        for layer in layers:
            for name in DELTAS:
                deltas = np.array(getattr(layer, name), np.float32)
                mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, deltas)
                setattr(layer, name, deltas.tolist())  # faster than giving it the array
        model.step()

    return step
