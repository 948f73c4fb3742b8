"""Tasks of the ranks in the tests of DDPSequential."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from support.networks import NETWORKS, distance, fresh, learn, parameters

from tagi_ddp import DDPSequential

STEPS = 5


def own_part(shares: Sequence[int], rank: int) -> slice:
    ends = list(accumulate(shares, initial=0))
    return slice(ends[rank], ends[rank + 1])


def train_on_shares(model: DDPSequential, name: str, shares: Sequence[int]) -> None:
    """Train on this rank's share; after each step the replicas must be equal."""
    part = own_part(shares, model.communicator.rank)
    for step in range(STEPS):
        x, y = NETWORKS[name].batch(step, sum(shares))
        learn(model, x[part], y[part])
        model.step()
        model.check_replicas()


def train_alone(name: str, start: dict[str, list[np.ndarray]], batch: int) -> Any:
    """Train the engine's own Sequential on the union of the shares, without this package."""
    model = fresh(name)
    learn(model, *NETWORKS[name].batch(STEPS, batch))  # some layers get their parameters here
    model.reset_lstm_states()
    model.load_state_dict({key: tuple(v.tolist() for v in values) for key, values in start.items()})
    if name == "embedding":  # whose deltas the engine adds up over all backward passes
        clear = model._cpp_backend.layers[0]
        clear.delta_mu_w = clear.delta_var_w = [0.0] * clear.num_weights
    for step in range(STEPS):
        learn(model, *NETWORKS[name].batch(step, batch))
        model.step()
    return model


Options = dict[str, Any]


def compare_with_one_process(
    comm: Any, name: str, shares: Sequence[int], options: Options
) -> float:
    model = DDPSequential(fresh(name), average=False, communicator=comm, **options)
    start = parameters(model)
    train_on_shares(model, name, shares)
    if comm.rank != 0:
        return 0.0
    alone = parameters(train_alone(name, start, sum(shares)))
    assert distance(start, alone) > 1e-3, "training has changed nothing: nothing to compare"
    return distance(parameters(model), alone)


def replicas(
    comm: Any, name: str, shares: Sequence[int], average: bool, options: Options
) -> list[str]:
    model = DDPSequential(fresh(name), average=average, communicator=comm, **options)
    start = parameters(model)
    train_on_shares(model, name, shares)
    state = parameters(model)
    assert distance(start, state) > 1e-4
    assert all(np.isfinite(v).all() for values in state.values() for v in values)
    assert all((values[i] > 0).all() for values in state.values() for i in (1, 3))
    digests = [model.check_replicas(), repr(state)]
    if name == "batch_norm":
        running = model.model.get_norm_mean_var()
        digests += [repr(values[:2]) for _, values in sorted(running.items())]
    return digests
