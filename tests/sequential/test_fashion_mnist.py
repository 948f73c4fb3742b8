"""Summed deltas, capped for the global batch, learn real images as one process does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from images import load_images
from support.rank_pool import RankPool
from support.tasks import own_part

from tagi_ddp import DDPSequential, reduce_metrics
from tagi_ddp.data import ClassTree

STEPS = 40
EPOCH = 60000 // 256
BATCH = 256
# With a small one, training amplifies rounding: one process that only sums each batch in another
# order then ends up to 3 points away from itself.
SIGMA_V = 2.0


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    try:
        load_images("fashion-mnist", limit=1)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def network() -> Any:
    import pytagi
    from pytagi.nn import Linear, ReLU, Sequential

    pytagi.manual_seed(3)
    return Sequential(Linear(784, 128), ReLU(), Linear(128, 128), ReLU(), Linear(128, 11))


def error_after_training(comm: Any, way: str, compute: str, steps: int) -> float:
    """Return the test error in percent after some global batches, the same for every ``way``."""
    from pytagi.nn import OutputUpdater

    data = load_images("fashion-mnist")
    tree, updater = ClassTree(10), OutputUpdater("cpu")
    targets, nodes = tree.decisions(data.y_train)
    model = network()
    if way != "pytagi":
        model = DDPSequential(model, None, False, communicator=comm, compute=compute)
    part = own_part([BATCH // comm.size] * comm.size, comm.rank)
    order = np.random.default_rng(5).permutation(60000)
    for step in range(steps):
        share = order[step * BATCH : (step + 1) * BATCH][part]
        model.forward(data.x_train[share].ravel())
        updater.update_using_indices(
            model.output_z_buffer,
            targets[share].ravel(),
            np.full(targets[share].size, SIGMA_V**2, np.float32),
            nodes[share].ravel(),
            model.input_delta_z_buffer,
        )
        model.backward()
        if way == "local cap":
            step_with_local_cap(model)
        else:
            model.step()
    wrong = seen = 0
    for images in np.array_split(np.arange(10000), 100)[comm.rank :: comm.size]:
        outputs = model.forward(data.x_test[images].ravel())
        predicted = tree.probabilities(*outputs).argmax(axis=1)
        wrong += np.sum(predicted != data.y_test[images])
        seen += len(images)
    return 100 * reduce_metrics(comm, wrong, seen)


def step_with_local_cap(model: DDPSequential) -> None:
    """Make a wrong step: the sum of the deltas, capped as for one rank's share."""
    parameters = model._local.replica.parameters
    parameters.refresh()
    bucket = np.empty(2 * parameters.size, np.float32)
    parameters.pack(bucket)
    model.communicator.all_reduce(bucket)
    parameters.apply(bucket, 1.0, BATCH // model.communicator.size)


@pytest.mark.parametrize("compute", [pytest.param("engine", marks=pytest.mark.slow), "torch"])
@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(shm: RankPool, compute: str) -> None:
    (alone,) = shm.run(error_after_training, "pytagi", compute, STEPS, size=1, limit=120)
    together = shm.run(error_after_training, "sum", compute, STEPS, size=2, limit=120)
    assert together[0] == together[1]
    assert abs(together[0] - alone) <= 0.2, (together, alone)
    assert alone < 40
    local, _ = shm.run(error_after_training, "local cap", compute, STEPS, size=2, limit=120)
    assert abs(local - alone) > 0.5, "this test cannot tell the cap factors apart"


@pytest.mark.slow
def test_torch_learns_in_an_epoch_what_the_engine_learns(shm: RankPool) -> None:
    (engine,) = shm.run(error_after_training, "pytagi", "engine", EPOCH, size=1, limit=240)
    (ours,) = shm.run(error_after_training, "sum", "torch", EPOCH, size=1, limit=240)
    assert abs(ours - engine) <= 0.3
    assert engine < 25
