"""DDPSequential over NCCL, on stand-ins for it and for CUDA: replicas on "cpu:0" take the place of
those on GPUs.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from support import tasks
from support.networks import EQUAL_TO_ONE_PROCESS, NETWORKS, distance, fresh, learn, parameters
from support.rank_pool import RankPool
from support.reports import Report, report

from tagi_ddp import CommunicatorError, DDPSequential
from tagi_ddp.replica.device_agreement import LAG

OPTIONS = {"device": "cpu:0"}
SHARES = [(130, 129)]
SHARES += [pytest.param(shares, marks=pytest.mark.slow) for shares in [(96,), (50, 151, 40, 30)]]


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", EQUAL_TO_ONE_PROCESS)
def test_equal_to_one_process(nccl: RankPool, name: str, shares: tuple[int, ...]) -> None:
    task = tasks.compare_with_one_process
    assert nccl.run(task, name, shares, OPTIONS, size=len(shares), limit=60)[0] < 1e-5


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_replicas(nccl: RankPool, name: str, average: bool) -> None:
    shares = (8, 9, 7, 10)
    states = nccl.run(tasks.replicas, name, shares, average, OPTIONS, limit=60)
    assert states == [states[0]] * len(shares)


def uneven(comm: Any, device: str, average: bool) -> dict[str, list[np.ndarray]]:
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
    running = model.get_norm_mean_var()["BatchNorm2d()_1"][:2]
    return parameters(model) | {"running": 2 * [np.ravel(values) for values in running]}


@pytest.mark.parametrize("average", [True, False])
def test_as_over_shared_memory(nccl: RankPool, shm: RankPool, average: bool) -> None:
    ours = nccl.run(uneven, "cpu:0", average, size=3, limit=60)
    theirs = shm.run(uneven, "cpu", average, size=3, limit=60)
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine, other) < 1e-5


def refuse(comm: Any, way: str) -> tuple[int, Report, bool]:
    model = DDPSequential(fresh("mlp"), communicator=comm, **OPTIONS)
    x, y = NETWORKS["mlp"].batch(comm.rank, 6)
    before = model.check_replicas()
    learn(model, x * np.inf if comm.rank == 1 else x, y)
    model.step()
    if way == "check":
        return 0, report(model.check_replicas), model.check_replicas() == before
    steps = 0

    def go_on() -> None:
        nonlocal steps
        while True:
            learn(model, x, y)
            model.step()
            steps += 1

    answer = report(go_on)
    model.check_replicas()  # the ranks go on together
    return steps, answer, True


@pytest.mark.parametrize("way", ["check", "go on"])
def test_refused_step_is_told_on_all_ranks_at_once(nccl: RankPool, way: str) -> None:
    answers = nccl.run(refuse, way, size=3)
    assert len(set(answers)) == 1
    steps, (kind, text, ranks), unchanged = answers[0]
    assert (kind, ranks, unchanged) == ("NotFiniteError", (1,), True), text
    assert steps == (0 if way == "check" else LAG - 1)


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
