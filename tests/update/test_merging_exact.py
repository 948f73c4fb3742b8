"""Merged posteriors are those of one process that has seen all, where these are known exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential
from tagi_ddp.optim import SyncSchedule
from update import linear

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool("shm", 8)
    yield pool
    pool.close()


def every(comm: Any, steps: int, node_size: int | None) -> tuple[float, str]:
    model = DDPSequential(
        linear.network(),
        communicator=comm,
        reduction="precision",
        sync_every=steps,
        node_size=node_size,
    )
    prior = linear.weights(model)
    for step in range(2 * steps):
        linear.learn(model, linear.samples(comm.rank, step))
    assert model.unmerged_steps == 0
    batches = [linear.samples(r, step) for r in range(comm.size) for step in range(2 * steps)]
    return linear.distance(model, linear.closed_form(*prior, batches)), model.check_replicas()


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize(
    ("size", "node_size"), [(1, None), (2, None), (4, None), (8, None), (8, 2)]
)
def test_every_so_many_steps(eight: RankPool, size: int, node_size: int | None, steps: int) -> None:
    answers = eight.run(every, steps, node_size, size=size)
    assert len({state for _, state in answers}) == 1
    assert max(error for error, _ in answers) < TOLERANCE


def scheduled(comm: Any, node_size: int, device: str) -> tuple[list[float], str, bool]:
    schedule = SyncSchedule(4, warmup_epochs=1, cooldown_epochs=1, max_global_skips=4)
    model = DDPSequential(
        linear.network(),
        communicator=comm,
        reduction="precision",
        sync_every=schedule,
        node_size=node_size,
        device=device,
    )
    exact = linear.weights(model)
    errors, positive = [], True
    for epoch in range(4):
        batches = 11 - epoch
        model.begin_epoch(batches)
        for step in range(batches):
            linear.learn(model, linear.samples(comm.rank, 20 * epoch + step))
            positive = positive and bool((linear.weights(model)[1] > 0).all())
        steps = range(20 * epoch, 20 * epoch + batches)
        seen = [linear.samples(r, step) for r in range(comm.size) for step in steps]
        exact = linear.closed_form(*exact, seen)
        errors.append(linear.distance(model, exact))
        assert model.end_epoch(float(comm.rank)) == (comm.size - 1) / 2
    return errors, model.check_replicas(), positive


@pytest.mark.parametrize(("size", "node_size"), [(4, 2), (4, 1), (4, 4), (6, 2), (1, 1)])
def test_by_a_schedule(eight: RankPool, size: int, node_size: int) -> None:
    """Nodes' changes arrive while the ranks go on: each sample counts once all the same."""
    answers = eight.run(scheduled, node_size, "cpu", size=size)
    assert len({state for _, state, _ in answers}) == 1
    for errors, _, positive in answers:
        assert max(errors) < TOLERANCE
        assert positive
