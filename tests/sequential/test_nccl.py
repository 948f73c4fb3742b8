"""DDPSequential over NCCL: on GPUs as on the CPU, and without waiting for the GPU.

On stand-ins for NCCL and CUDA, replicas on "cpu:0" take the place of those on GPUs. Two ranks share
a GPU if there is one only.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import tasks
from support.devices import Devices
from support.networks import (
    EQUAL_TO_ONE_PROCESS,
    NETWORKS,
    SIGMA_V,
    distance,
    fresh,
    learn,
    parameters,
    parameters_and_averages,
)
from support.rank_pool import RankPool
from support.reports import Report, report
from support.waiting import no_waiting

from sequential.test_sharded import train_plain_and_sharded
from tagi_ddp import CommunicatorError, DDPSequential, OutputUpdater
from tagi_ddp.replica.device_agreement import LAG

OPTIONS = {"device": "cpu:0"}
UNIONS = [(130, 129)]
UNIONS += [pytest.param(shares, marks=pytest.mark.slow) for shares in [(96,), (50, 151, 40, 30)]]
SHARES = (30, 41, 7, 10)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def train_by_torch(
    comm: Any, name: str, average: bool, device: str | None
) -> tuple[str, dict[str, list[np.ndarray]]]:
    options = {"compute": "torch", "device": device}
    model = DDPSequential(fresh(name), average=average, communicator=comm, **options)
    start = parameters(model)
    tasks.train_on_shares(model, name, SHARES[: comm.size])
    state = parameters(model)
    assert distance(start, state) > 1e-3
    assert all(np.isfinite(v).all() for values in state.values() for v in values)
    assert all((values[i] > 0).all() for values in state.values() for i in (1, 3))
    return model.check_replicas(), parameters_and_averages(model)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_as_on_the_cpu(devices: Devices, shm: RankPool, name: str, average: bool) -> None:
    size = devices.ranks(4)
    ours = devices.pool.run(train_by_torch, name, average, devices.replica, size=size, limit=120)
    theirs = shm.run(train_by_torch, name, average, "cpu", size=size, limit=60)
    assert len({digest for digest, _ in ours}) == 1
    for _, state in ours:
        assert distance(state, ours[0][1]) == 0
    assert distance(ours[0][1], theirs[0][1]) < devices.rounding


def uneven(comm: Any, device: str | None, average: bool) -> dict[str, list[np.ndarray]]:
    """Micro-batches, empty shares, and ranks that run out of data at different times."""
    model = DDPSequential(fresh("batch_norm"), None, average, communicator=comm, device=device)
    with model.join():
        for step in range(2 + comm.rank):
            with model.no_sync():
                learn(model, *NETWORKS["batch_norm"].batch(step, 4 + comm.rank))
                learn(model, *NETWORKS["batch_norm"].batch(step + 10, 6))
            model.step()
    x, y = NETWORKS["batch_norm"].batch(20, 6)
    if comm.rank == 0:
        model(x[:0])
        model.backward()
    else:
        learn(model, x, y)
    model.step()
    model.check_replicas()
    return parameters_and_averages(model)


@pytest.mark.parametrize("average", [True, False])
def test_join_and_micro_batches(devices: Devices, shm: RankPool, average: bool) -> None:
    size = devices.ranks(3)
    ours = devices.pool.run(uneven, devices.replica, average, size=size, limit=60)
    theirs = shm.run(uneven, "cpu", average, size=size, limit=60)
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine, other) < devices.rounding


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "batch_norm"])
def test_sharded_replicas(devices: Devices, name: str) -> None:
    options, size = {"compute": "torch", "device": devices.replica}, devices.ranks(3)
    answers = devices.pool.run(train_plain_and_sharded, name, False, options, size=size, limit=120)
    for plain, sharded in answers:  # NCCL may add in another order
        assert distance(plain[1], sharded[1]) <= (0 if devices.stand_in else 1e-5)
    assert len({sharded[0][-1] for _, sharded in answers}) == 1


def refuse_steps_of_the_last(comm: Any, device: str | None) -> tuple[Report, Report, int]:
    model = DDPSequential(fresh("mlp"), communicator=comm, device=device)
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


def test_refused_step_is_told_on_all_ranks_at_once(devices: Devices) -> None:
    size = devices.ranks(3)
    answers = devices.pool.run(refuse_steps_of_the_last, devices.replica, size=size)
    assert len(set(answers)) == 1
    *told, steps = answers[0]
    assert [(kind, ranks) for kind, _, ranks in told] == [("NotFiniteError", (size - 1,))] * 2
    assert steps == LAG - 1


# --- on stand-ins alone ---


@pytest.mark.parametrize("shares", UNIONS, ids=str)
@pytest.mark.parametrize("name", EQUAL_TO_ONE_PROCESS)
def test_equal_to_one_process(nccl: RankPool, name: str, shares: tuple[int, ...]) -> None:
    task = tasks.compare_with_one_process
    assert nccl.run(task, name, shares, OPTIONS, size=len(shares), limit=60)[0] < 1e-5


def refuse_after_one_has_joined(comm: Any, steps: int) -> tuple[Report, Report]:
    """Rank 0 has no data from the second step on; rank 1's second step is refused."""
    model = DDPSequential(fresh("mlp"), communicator=comm, **OPTIONS)
    x, y = NETWORKS["mlp"].batch(comm.rank, 6)

    def work() -> None:
        with model.join():
            for step in range(1 + steps * comm.rank):
                learn(model, x * np.inf if step == 1 else x, y)
                model.step()
        model.check_replicas()

    answer = report(work)
    return answer, report(lambda: model.step())


@pytest.mark.parametrize("steps", [2, LAG + 3])
def test_refused_step_while_others_have_joined(nccl: RankPool, steps: int) -> None:
    answers = nccl.run(refuse_after_one_has_joined, steps, size=2, fresh=True)
    for (kind, text, ranks), (again, _, _) in answers:
        assert (kind, ranks) == ("NotFiniteError", (1,)), text
        assert again == "RuntimeError"  # no backward: the group goes on


def abort_in_a_step(comm: Any, operation: str) -> tuple[str, bool]:
    """A step whose exchange fails changes nothing on any rank."""
    model = DDPSequential(fresh("mlp"), communicator=comm, **OPTIONS)
    x, y = NETWORKS["mlp"].batch(comm.rank, 6)
    learn(model, x, y)
    model.step()
    before = parameters(model)
    learn(model, x, y)
    os.environ["TAGI_DDP_STAND_IN_FAULT"] = f"{operation}:async=6@1"
    try:
        with pytest.raises(CommunicatorError) as error:
            model.step()
    finally:
        del os.environ["TAGI_DDP_STAND_IN_FAULT"]
    model._local.replica.export()
    after = parameters(model)
    same = all(np.array_equal(after[k][i], before[k][i]) for k in before for i in range(4))
    return str(error.value), same


@pytest.mark.parametrize("operation", ["ncclAllReduce", "ncclAllGather"])
def test_failed_step_changes_nothing(nccl: RankPool, operation: str) -> None:
    for text, same in nccl.run(abort_in_a_step, operation, size=2, fresh=True, limit=60):
        assert same
        assert "rank" in text


def on_the_host(comm: Any) -> Report:
    return report(lambda: DDPSequential(fresh("mlp"), communicator=comm, device="cpu"))


def test_replica_on_the_host_is_refused(nccl: RankPool) -> None:
    for kind, text, _ in nccl.run(on_the_host, size=2, fresh=True):
        assert kind == "ValueError"
        assert "device=" in text


# --- on GPUs alone ---


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
    with no_waiting():
        for _ in range(LAG):
            step()
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_ranks_are_forked_before_cuda_begins() -> None:
    with contextlib.closing(RankPool("shm", 2)) as pool:
        assert pool.run(first_use, limit=60) == [1.0] * 2
