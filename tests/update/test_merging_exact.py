"""By Bayes' rule merged posteriors are those of one process that has seen all, where TAGI is exact.

And where it is not: of correlated inputs no Gaussian with a diagonal covariance is the posterior.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential, DistributedSampler
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
        merge="bayes",
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
        merge="bayes",
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


def regression(correlated: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and outputs of a linear model; inputs may follow a few factors."""
    rng = np.random.default_rng(0)
    samples, inputs, noise, part = 36000, 256, 0.5, 0.8 if correlated else 0.0
    factors = rng.normal(size=(samples, 4)) @ rng.normal(size=(4, inputs)) / 2
    x = part**0.5 * factors + (1 - part) ** 0.5 * rng.normal(size=(samples, inputs))
    y = x @ rng.normal(size=(inputs, 1))
    y = y / y.std() + noise * rng.normal(size=y.shape)
    return x.astype(np.float32), y.astype(np.float32)


def errors_of(comm: Any, correlated: bool, options: dict[str, Any]) -> tuple[float, float]:
    """Train a single Linear layer in local batches, merged at every 4,096 samples.

    Returns the RMSE of new samples: of the predictions, and of predicting 0.
    """
    from pytagi import manual_seed
    from pytagi.nn import Linear, Sequential

    x, y = regression(correlated)
    learned = len(x) * 8 // 9
    manual_seed(0)
    network = Sequential(Linear(x.shape[1], 1))
    with DDPSequential(network, communicator=comm, reduction="precision", **options) as model:
        for share in DistributedSampler(learned, comm.size, comm.rank).batches(4096):
            for part in model.local_batches(share, 32):
                model.learn(x[part], y[part], 0.5**2)
        model.merge()
        new = y[learned:].ravel()
        mean, _ = model(x[learned:])
    return float(np.sqrt(np.mean((mean - new) ** 2))), float(np.sqrt(np.mean(new**2)))


def test_the_default_learns_from_correlated_inputs_and_bayes_rule_diverges(eight: RankPool) -> None:
    one, nothing = eight.run(errors_of, True, {}, size=1)[0]
    default = eight.run(errors_of, True, {}, size=4)[0][0]
    bayes = eight.run(errors_of, True, {"merge": "bayes"}, size=4)[0][0]
    assert one < default < 1.15 * one
    assert bayes > 2 * nothing


def test_bayes_rule_is_as_good_as_one_process_where_inputs_are_uncorrelated(
    eight: RankPool,
) -> None:
    one, _ = eight.run(errors_of, False, {}, size=1)[0]
    bayes = eight.run(errors_of, False, {"merge": "bayes"}, size=4)[0][0]
    assert abs(bayes / one - 1) < 0.01
