"""`cap_factor`: the limit of a step, chosen by name, in every exchange and on every device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytagi.nn import Linear, Sequential
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential, accelerate
from tagi_ddp._backend import LEAST_VARIANCE, cap_factor
from tagi_ddp.communicators.single import SingleCommunicator

MEAN, VARIANCE, NOISE = 0.5, 0.25, 1.0
FACTORS = [None, 0, 0.5, 3.0]


def weight(comm: Any, options: dict[str, Any], target: float, steps: int = 1) -> tuple[float, ...]:
    """Return the one weight's mean and variance after steps of one sample on each rank."""
    net = Sequential(Linear(1, 1, bias=False))
    net.preinit_layer()
    (name,) = net.state_dict()
    net.load_state_dict({name: ([MEAN], [VARIANCE], [], [])})
    with DDPSequential(net, communicator=comm, average=False, **options) as model:
        one = np.ones(1, np.float32)
        for _ in range(steps):
            model.learn(one, target * one, NOISE)
        mean, variance, *_ = model.state_dict()[name]
        return float(mean[0]), float(variance[0])


def expected(factor: float, samples: int, target: float) -> tuple[float, float]:
    """Return mean and variance by the rule of a linear model and the limit of a step."""
    total = VARIANCE + NOISE
    steps = samples * VARIANCE / total * (target - MEAN), -samples * VARIANCE**2 / total
    limit = math.sqrt(VARIANCE) / factor if factor else math.inf
    mean, variance = (
        start + min(max(step, -limit), limit)
        for start, step in zip((MEAN, VARIANCE), steps, strict=True)
    )
    return mean, variance if variance > 0 else LEAST_VARIANCE


@given(
    factor=st.none() | st.just(0.0) | st.floats(1e-3, 1e3),
    target=st.floats(-1e4, 1e4, width=32),
    compute=st.sampled_from(["engine", "native", "torch"]),
)
@settings(max_examples=30, deadline=None)
def test_a_step_of_one_rank(factor: float | None, target: float, compute: str) -> None:
    found = weight(SingleCommunicator(), {"cap_factor": factor, "compute": compute}, target)
    used = cap_factor(1) if factor is None else factor
    np.testing.assert_allclose(found, expected(used, 1, target), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_sum_of_ranks(
    shm: RankPool, gloo: RankPool, factor: float | None, device: str, sharded: bool
) -> None:
    options = {"cap_factor": factor, "device": device, "sharded": sharded}
    options["compute"] = "native" if device == "cpu" else "torch"
    used = cap_factor(3) if factor is None else factor
    for pool in (shm, gloo):
        for found in pool.run(weight, options, 1000.0, size=3):
            np.testing.assert_allclose(found, expected(used, 3, 1000), rtol=2e-4)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
@pytest.mark.parametrize("factor", FACTORS)
def test_steps_of_ranks_that_merge_later(shm: RankPool, factor: float | None, device: str) -> None:
    """By agreement a rank's step goes 1 / sqrt(ranks) as far as one of all ranks may."""
    options = {"cap_factor": factor, "device": device, "reduction": "precision", "sync_every": 9}
    used = cap_factor(3) if factor is None else factor
    found = shm.run(weight, options, 1000.0, size=3)[0]
    np.testing.assert_allclose(found, expected(math.sqrt(3) * used, 1, 1000), rtol=2e-4)


def test_it_is_that_of_all_layers() -> None:
    model = accelerate(Sequential(Linear(2, 3), Linear(3, 1)), cap_factor=4)
    assert model._local.replica.on_host.cap_factors(1) == [4, 4]


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "2", True])
def test_a_wrong_factor(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="cap_factor must be"):
        accelerate(Sequential(Linear(1, 1)), cap_factor=value)


def differ(comm: Any) -> str:
    try:
        DDPSequential(Sequential(Linear(1, 1)), communicator=comm, cap_factor=comm.rank)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_factors_are_refused(shm: RankPool) -> None:
    assert all("cap_factor" in text for text in shm.run(differ, size=2))
