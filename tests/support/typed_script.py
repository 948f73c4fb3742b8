# pyright: strict
"""A script as users write it, for strict type checkers: they know the type of all that it uses."""

from __future__ import annotations

import numpy as np

from tagi_ddp import (
    DDPConfig,
    DDPSequential,
    DistributedSampler,
    accelerate,
    init,
    launch,
    map_networks,
)
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.optim import SyncSchedule
from tagi_ddp.sklearn import TAGIRegressor


def work(seed: int) -> float:
    return float(seed)


def main(x: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    config = DDPConfig.from_env("shm")
    with DDPSequential(None, config, average=False) as model:
        mean, variance = model.learn(x, x, 0.1)
        print(mean.sum(), variance.sum(), model.communicator.rank, model.check_replicas())
        mean, variance = model.predict(x, 0.1)
        sampler = DistributedSampler(x, seed=1)
        with Checkpoints("run", model, sampler=sampler) as checkpoints:
            for step, share in sampler.steps(10, 2, checkpoints.resume()):
                model.learn(x[share], x[share], 0.1)
                checkpoints.save(step + 1)
        print(model.state_dict(), model.changes, sampler.rank, model.config.world_size)
    other = accelerate(None)
    other.learn(x, x)
    print(map_networks(work, [1, 2]), launch(work, 2, (1,)))
    with init("gloo", 0, 1) as comm:
        comm.all_reduce(x)
    print(TAGIRegressor().fit(x, x).predict(x), SyncSchedule(2).skips)
