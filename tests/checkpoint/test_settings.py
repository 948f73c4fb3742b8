"""A run goes on with other settings, or on other ranks, from what the ranks knew together."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.networks import NETWORKS, distance, fresh, learn, parameters
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.optim import SyncSchedule

BATCHES = 6
SCHEDULES = {"short": (3, 4), "long": (5, 8)}  # epochs, longest skip
COMPUTES = {"mlp": ["auto", "engine", "native", "torch"], "resnet": ["engine", "torch"]}
COMPUTES["lstm"] = COMPUTES["mlp"]

Setting = tuple[int, dict[str, Any]]  # ranks, options


def any_setting(draw: random.Random, network: str) -> Setting:
    size = draw.randint(1, 4)
    reduction = draw.choice(["mean", "sum", "precision", "precision", "precision"])
    options: dict[str, Any] = {"reduction": reduction, "compute": draw.choice(COMPUTES[network])}
    if reduction == "precision":
        options["sync_every"] = draw.choice([1, 3, 8, *SCHEDULES])
        options["merge"] = draw.choice([None, "agreement", "bayes"])
        options["compress"] = draw.choice([None, None, "bf16", "int8"])
        nodes = [None, *(n for n in range(1, size + 1) if size % n == 0)]
        options["node_size"] = draw.choice(nodes)
    else:
        options["sharded"] = draw.random() < 0.3
    return size, options


class Part:
    """A part of a run: some steps, by a model and checkpoints of its own."""

    def __init__(self, comm: Any, network: str, folder: str, options: dict[str, Any]) -> None:
        self.network, self.options = network, dict(options)
        self.scheduled = options.get("sync_every") in SCHEDULES
        if self.scheduled:
            epochs, skip = SCHEDULES[options["sync_every"]]
            self.options["sync_every"] = SyncSchedule(epochs, 0, 1, max_global_skips=skip)
        self.model = DDPSequential(fresh(network), communicator=comm, **self.options)
        self.checkpoints = Checkpoints(folder, self.model)

    def go(self, first: int, until: int, was_scheduled: bool) -> None:
        for step in range(first, until):
            if self.scheduled and (step == 0 or (step == first and not was_scheduled)):
                self.model.begin_epoch(BATCHES)
            x, y = NETWORKS[self.network].batch(step, 24)
            comm = self.model.communicator
            learn(self.model, x[comm.rank :: comm.size], y[comm.rank :: comm.size])
            self.model.step()

    def end(self) -> tuple[str, Any]:
        if self.options["reduction"] == "precision":
            self.model.merge()
        found = self.model.check_replicas(), parameters(self.model)
        self.checkpoints.close()
        self.model.close()
        return found


def save_with_settings(comm: Any, network: str, folder: str, options: Any, until: int) -> Any:
    """Return what a merge makes of the state that was saved, and what a whole run ends with."""
    part = Part(comm, network, folder, options)
    part.go(0, until, was_scheduled=False)
    part.checkpoints.save(until)
    part.checkpoints.wait()
    known = part.end()[1]
    whole = Part(comm, network, f"{folder}.whole", options)
    whole.go(0, BATCHES, was_scheduled=False)
    return known, whole.end()[0]


def resume_with_settings(
    comm: Any, network: str, folder: str, options: Any, was_scheduled: bool
) -> Any:
    part = Part(comm, network, folder, options)
    first = part.checkpoints.resume()
    known = None
    if part.model.unmerged_steps == 0:
        part.model.check_replicas()
        known = parameters(part.model)
    part.go(first, BATCHES, was_scheduled)
    return known, part.end()[0]


def check(shm: RankPool, folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    network = draw.choice(["mlp", "mlp", "resnet", "lstm"])
    before = any_setting(draw, network)
    after = before if draw.random() < 0.2 else any_setting(draw, network)
    until = draw.randint(1, BATCHES - 1)
    told = f"seed {seed}: {network}, {before} to {after} after {until}"
    path = str(folder / str(seed))
    known, whole = shm.run(save_with_settings, network, path, before[1], until, size=before[0])[0]
    was_scheduled = before[1].get("sync_every") in SCHEDULES
    arguments = (network, path, after[1], was_scheduled)
    answers = shm.run(resume_with_settings, *arguments, size=after[0])
    found, end = answers[0]
    assert {answer for _, answer in answers} == {end}, told
    if after == before:
        assert end == whole, told
    elif found is None:  # each has its own again
        names = ("reduction", "sync_every", "compress")
        assert before[0] == after[0], told
        assert all(before[1].get(name) == after[1].get(name) for name in names), told
    elif before[1].get("compress") is None or before[0] == 1:  # which drops what was not sent
        assert distance(found, known) < 1e-4, told
    shutil.rmtree(path)


def test_other_settings(shm: RankPool, tmp_path: Path) -> None:
    for seed in [*range(7), 224, 265]:  # the last two with sums in flight
        check(shm, tmp_path, seed)


def test_a_schedule_in_place_of_steps(shm: RankPool, tmp_path: Path) -> None:
    """And the other way round, which a few random pairs may leave out."""
    options = {"reduction": "precision", "compute": "engine"}
    for one, other in ((8, "short"), ("short", 8), ("short", "long")):
        path = str(tmp_path / f"{one}-{other}")
        arguments = ("mlp", path, {**options, "sync_every": one}, 2)
        known, _ = shm.run(save_with_settings, *arguments, size=2)[0]
        now = {**options, "sync_every": other}
        found = shm.run(resume_with_settings, "mlp", path, now, one in SCHEDULES, size=2)
        assert distance(found[0][0], known) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_other_settings(shm: RankPool, tmp_path: Path, part: int) -> None:
    for seed in range(100 + 30 * part, 130 + 30 * part):
        check(shm, tmp_path, seed)
