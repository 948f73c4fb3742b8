"""Differences between ranks raise an error on all at once. Its text names the argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from optim.torch_cases import descend, values
from tagi_ddp.optim import DASO, DataParallel, DataParallelMultiGPU

MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
Build = Callable[[], nn.Module]


def told(action: Callable[[], Any]) -> str:
    """Return the text of the error that ends the action long before the timeout."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        assert time.monotonic() - start < 5  # not the timeout
        return f"{type(error).__name__}: {error}"
    return ""


MODULES: dict[str, tuple[Build, Build, str]] = {
    "shapes": (
        lambda: nn.Linear(3, 2),
        lambda: nn.Linear(2, 3),
        "module weight of rank 1: float32[3, 2]; rank 0 has module weight: float32[2, 3]",
    ),
    "sizes": (
        lambda: nn.Linear(3, 2, bias=False),
        lambda: nn.Linear(5, 2, bias=False),
        "module weight of rank 1: float32[2, 5]; rank 0 has module weight: float32[2, 3]",
    ),
    "order": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()),
        "module 1 of rank 1: Linear; rank 0 has module 1: Tanh",
    ),
    "dtypes": (
        lambda: nn.Linear(2, 2, dtype=torch.float64),
        lambda: nn.Linear(2, 2),
        "module weight of rank 1: float32[2, 2]; rank 0 has module weight: float64[2, 2]",
    ),
    "frozen": (
        lambda: nn.Linear(2, 2),
        lambda: nn.Linear(2, 2).requires_grad_(False),
        "module weight of rank 1: float32[2, 2], frozen; rank 0 has",
    ),
    "no module": (
        lambda: nn.Linear(2, 2),
        lambda: "net",  # type: ignore[return-value,arg-type]
        "rank 1: module must be a torch.nn.Module, got 'net'",
    ),
}


@MODES
@pytest.mark.parametrize("name", MODULES)
def test_modules(shm: RankPool, name: str, blocking: bool) -> None:
    def task(comm: Any) -> str:
        first, other, _ = MODULES[name]
        net = first() if comm.rank == 0 else other()
        params = net.parameters() if isinstance(net, nn.Module) else first().parameters()
        before = values(net) if isinstance(net, nn.Module) else []
        optimizer = descend(list(params))  # the first one imports much of torch
        text = told(lambda: DataParallel(net, comm, optimizer, blocking))
        if before:
            assert all(torch.equal(a, b) for a, b in zip(values(net), before, strict=True))
        comm.barrier()  # the communicator goes on working
        return text

    first, second = shm.run(task, size=2)
    text = MODULES[name][2]
    refused = text.startswith("rank 1: ")
    assert first.startswith("OtherTypeError: " if refused else "RanksDiffer: the ranks' arguments")
    assert text in first
    assert second == (text.replace("rank 1", "TypeError") if refused else first)


def test_arguments_of_data_parallel(shm: RankPool) -> None:
    def task(comm: Any, what: str) -> str:
        net = nn.Linear(2, 2)
        params = list(net.parameters())
        if what == "optimizer" and comm.rank == 1:
            params.reverse()
        optimizer = descend(params)
        return told(lambda: DataParallel(net, comm, optimizer, what != str(comm.rank)))

    for text in shm.run(task, "optimizer", size=2):
        assert "first at parameter 0 of optimizer 0 of rank 1: bias, float32[2]; rank 0" in text
    for text in shm.run(task, "1", size=2):
        assert "first at blocking of rank 1: False; rank 0 has blocking: True" in text


SETTINGS: dict[str, tuple[Any, Any]] = {
    "total_epochs": (5, 6),
    "warmup_epochs": (1, 0),
    "stability_level": (0.1, 0.2),
    "max_global_skips": (8, 4),
    "sending_chunk_size": (10, 20),
    "downcast_type": (torch.half, torch.float),
    "local_skip_factor": (4, 1),
    "node_size": (1, 2),
    "local_weight": (2.0, 1.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_daso(shm: RankPool, name: str) -> None:
    def task(comm: Any) -> str:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
        arguments = {"total_epochs": 5, name: SETTINGS[name][comm.rank]}
        return told(lambda: DASO(optimizer, comm=comm, **arguments))

    mine, other = SETTINGS[name]
    for text in shm.run(task, size=2):
        assert f"first at {name} of rank 1: {other}; rank 0 has {name}: {mine}." in text


def test_a_wrong_setting_of_one_rank(shm: RankPool) -> None:
    def task(comm: Any) -> str:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
        return told(lambda: DASO(optimizer, comm.rank, comm))

    refused, other = shm.run(task, size=2)
    assert refused == "ValueError: total_epochs must be at least 1, got 0"
    assert other == "RanksDiffer: rank 0: total_epochs must be at least 1, got 0"


def epoch(comm: Any, node_size: int, warmup: int, last: list[Any], steps: list[int]) -> str:
    """Make an epoch of as many steps and of such a ``last_batch`` as this rank is told."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    daso = DASO(optimizer, 5, comm, warmup, 0, node_size=node_size)
    model = DataParallelMultiGPU(net, daso)
    daso.last_batch = last[comm.rank]

    def run() -> None:
        for _ in range(steps[comm.rank]):
            daso.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            daso.step()
        daso.epoch_loss_logic(1.0)

    text = told(run)
    daso.close()
    return text


@pytest.mark.parametrize("node_size", [1, 2, 4])
@pytest.mark.parametrize("last", [[9, 9, 10, 9], [10, None, 10, 10]])
def test_last_batch(shm: RankPool, node_size: int, last: list[Any]) -> None:
    texts = shm.run(epoch, node_size, 0, last, [9] * 4, fresh=True)
    for text in texts:
        if None in last:
            assert "last_batch is not set" in text
        else:
            assert "last_batch of rank 2: 10; rank 0 has last_batch: 9. last_batch is" in text


@pytest.mark.parametrize("node_size", [1, 2, 4])
@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize(
    ("last", "steps"),
    [
        (20, [20, 19, 20, 20]),
        (20, [20, 20, 20, 21]),
        (20, [20, 20, 17, 20]),
        (20, [20, 20, 20, 1]),
        (20, [0, 20, 20, 20]),
        (20, [4, 4, 3, 3]),
    ],
)
def test_numbers_of_batches(
    shm: RankPool, node_size: int, warmup: int, last: int, steps: list[int]
) -> None:
    for text in shm.run(epoch, node_size, warmup, [last] * 4, steps, fresh=True):
        assert "last_batch is the number of" in text
