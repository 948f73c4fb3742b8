"""DDPSequential over NCCL's own library, on GPUs: as on the CPU, and without waiting for the GPU.

Where there is one GPU, two ranks share it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import tasks
from support.networks import NETWORKS, SIGMA_V, distance, fresh, learn, parameters
from support.rank_pool import RankPool
from support.reports import Report, report

from sequential.test_nccl import uneven
from sequential.test_sharded import both
from tagi_ddp import DDPSequential, OutputUpdater
from tagi_ddp.replica.device_agreement import LAG

pytestmark = pytest.mark.gpu

SHARES = (30, 41)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def train(comm: Any, name: str, average: bool) -> tuple[str, dict[str, list[np.ndarray]]]:
    model = DDPSequential(fresh(name), average=average, communicator=comm, compute="torch")
    start = parameters(model)
    tasks.train(model, name, SHARES[: comm.size])
    assert distance(start, parameters(model)) > 1e-3
    state = parameters(model)
    if name == "batch_norm":
        for layer, (mean, variance, *_) in model.get_norm_mean_var().items():
            state[f"running {layer}"] = 2 * [np.ravel(mean), np.ravel(variance)]
    return model.check_replicas(), state


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_cpu(gpu: RankPool, shm: RankPool, name: str, average: bool) -> None:
    ours = gpu.run(train, name, average, limit=120)
    theirs = shm.run(train, name, average, size=gpu.size, limit=60)
    assert len({digest for digest, _ in ours}) == 1
    assert distance(ours[0][1], theirs[0][1]) < 1e-4


@pytest.mark.parametrize("average", [True, False])
def test_join_and_micro_batches(gpu: RankPool, shm: RankPool, average: bool) -> None:
    ours = gpu.run(uneven, None, average, limit=60)
    theirs = shm.run(uneven, "cpu", average, size=gpu.size, limit=60)
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine, other) < 1e-4


@pytest.mark.parametrize("name", ["resnet", "batch_norm"])
def test_sharded_replicas(gpu: RankPool, name: str) -> None:
    answers = gpu.run(both, name, False, {"compute": "torch"}, limit=120)
    for plain, sharded in answers:  # NCCL may add in another order
        assert distance(plain[1], sharded[1]) < 1e-5
    assert len({sharded[0][-1] for _, sharded in answers}) == 1


def refuse(comm: Any) -> tuple[Report, Report, int]:
    model = DDPSequential(fresh("mlp"), communicator=comm)
    x, y = NETWORKS["mlp"].batch(comm.rank, 6)
    bad = x * np.inf if comm.rank == comm.size - 1 else x
    before = model.check_replicas()
    learn(model, bad, y)
    model.step()
    first = report(model.check_replicas)
    assert model.check_replicas() == before
    learn(model, bad, y)
    model.step()
    steps = 0

    def go_on() -> None:
        nonlocal steps
        while True:
            learn(model, x, y)
            model.step()
            steps += 1

    second = report(go_on)
    model.check_replicas()
    return first, second, steps


def test_refused_step(gpu: RankPool) -> None:
    answers = gpu.run(refuse)
    assert len(set(answers)) == 1
    *told, steps = answers[0]
    assert [(kind, ranks) for kind, _, ranks in told] == [("NotFiniteError", (gpu.size - 1,))] * 2
    assert steps == LAG - 1


def stepper(model: DDPSequential, name: str) -> Callable[[], None]:
    """Return a training step that has all it needs on the GPU, and has been done often enough."""
    device = model._local.replica.parameters.mu.device
    x, y = (torch.from_numpy(a).to(device) for a in NETWORKS[name].batch(0, 20))
    noise = torch.full_like(y, SIGMA_V**2)
    updater = OutputUpdater(model)

    def step() -> None:
        model(x)
        updater.update(y, noise)
        model.backward()
        model.step()

    for _ in range(LAG):  # the next one looks at the first one's outcome
        step()
    return step


def step_without_waiting(comm: Any, name: str) -> None:
    model = DDPSequential(fresh(name), communicator=comm)
    step = stepper(model, name)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(LAG):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    model.check_replicas()


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_do_not_wait(gpu: RankPool, name: str) -> None:
    gpu.run(step_without_waiting, name, limit=60)


def profile(comm: Any, name: str) -> Counter[str]:
    """Return how often the host called what, of CUDA's runtime, in `LAG` steps."""
    from torch.profiler import ProfilerActivity, record_function

    model = DDPSequential(fresh(name), communicator=comm)
    step = stepper(model, name)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler, record_function("the steps"):
        for _ in range(LAG):
            step()
    events = profiler.events()
    steps = next(event.time_range for event in events if event.name == "the steps")
    return Counter(
        event.name
        for event in events
        if steps.start <= event.time_range.start <= steps.end and event.name.startswith("cu")
    )


@pytest.mark.parametrize("name", ["mlp", "batch_norm"])
def test_profile_of_steps(gpu: RankPool, name: str) -> None:
    """Apart from the look at a step `LAG` steps ago, nothing waits."""
    for calls in gpu.run(profile, name, limit=120):
        assert any("LaunchKernel" in call for call in calls), calls
        waits = {call: calls[call] for call in WAITS if call in calls}
        assert set(waits) <= {"cudaEventSynchronize"}, calls
        assert waits.get("cudaEventSynchronize", 0) <= LAG, calls


def first_use(comm: Any) -> float:
    assert not torch.cuda.is_initialized()
    return float(torch.ones(1, device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_ranks_are_forked_before_cuda_begins() -> None:
    with contextlib.closing(RankPool("shm", 2)) as pool:
        assert pool.run(first_use, limit=60) == [1.0] * 2
