"""A GradScaler of torch that steps a DataParallelOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from optim.torch_cases import (
    Plain,
    assert_replicas_equal,
    batch,
    descend,
    distance,
    loss_of,
    make,
    small_buckets,
    values,
)
from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer

MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])


@MODES
@pytest.mark.parametrize("by_caller", [False, True])
@pytest.mark.parametrize("size", [2, 1])
def test_all_ranks_skip_the_step_of_an_overflow(
    shm: RankPool, size: int, by_caller: bool, blocking: bool
) -> None:
    """Whoever unscales; afterwards ranks may have different scales."""

    def task(comm: Any) -> None:
        net, one = make(Plain), make(Plain)
        optimizer = DataParallelOptimizer(torch.optim.Adam(net.parameters(), 0.1))
        serial = torch.optim.Adam(one.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", 1024.0)
        last = comm.rank == comm.size - 1
        with small_buckets(), DataParallel(net, comm, optimizer, blocking) as model:
            for step in range(4):
                optimizer.zero_grad()
                loss = loss_of(model, batch(step)[comm.rank :: comm.size])
                scaler.scale(loss * (torch.inf if last and step == 1 else 1.0)).backward()
                if by_caller:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                if step != 1:
                    serial.zero_grad()
                    loss_of(one, batch(step)).backward()
                    serial.step()
        assert scaler.get_scale() == (512 if last else 1024)
        assert distance(values(net), values(one)) < 1e-12
        assert_replicas_equal(comm, net)

    shm.run(task, size=size)


def test_gradients_of_float16_are_refused(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = nn.Linear(3, 1, dtype=torch.float16)
        optimizer = descend(net.parameters())
        scaler = torch.amp.GradScaler("cpu")
        with DataParallel(net, comm, optimizer) as model:
            scaler.scale(model(torch.ones(2, 3, dtype=torch.float16)).sum()).backward()
            with pytest.raises(ValueError, match="parameters of float32, got some of float16"):
                scaler.step(optimizer)

    shm.run(task, size=1)
