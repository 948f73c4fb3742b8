"""Training on a group of torch's backend "tagi_ddp" leaves the group's communicator open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import RankPool
from torch import nn

from parallel.support import torch_group
from tagi_ddp.optim import DASO, DataParallel, DataParallelMultiGPU, DataParallelOptimizer


def step(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def data_parallel(blocking: bool) -> None:
    net = nn.Linear(3, 1)
    optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), 0.1), blocking)
    with DataParallel(net, dist.group.WORLD, optimizer, blocking) as model:
        step(model)
        optimizer.step()


def daso() -> None:
    net = nn.Linear(3, 1)
    with DASO(torch.optim.SGD(net.parameters(), 0.1), 4, dist.group.WORLD) as optimizer:
        model = DataParallelMultiGPU(net, optimizer)
        optimizer.last_batch = 1
        step(model)
        optimizer.step()


WAYS: dict[str, Callable[[], None]] = {
    "blocking": lambda: data_parallel(True),
    "lagging": lambda: data_parallel(False),
    "daso": daso,
}


def use_and_close(comm: Any, path: str, way: str) -> float:
    with torch_group(comm, path):
        WAYS[way]()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()


@pytest.mark.parametrize("way", WAYS)
def test_the_group_stays_open(shm: RankPool, way: str, tmp_path: Path) -> None:
    assert shm.run(use_and_close, str(tmp_path / "f"), way, size=2) == [2.0, 2.0]
