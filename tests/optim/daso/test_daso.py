"""DASO: every parameter of every rank after every batch, against a slow reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from optim.daso import reference
from tagi_ddp.optim.daso import DASO, DataParallelMultiGPU


@pytest.fixture(scope="module")
def six() -> Iterator[RankPool]:
    pool = RankPool("shm", 6)
    yield pool
    pool.close()


def linear() -> nn.Linear:
    """Return the reference's layer."""
    layer = nn.Linear(reference.INPUTS, reference.OUTPUTS)
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), reference.begin(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return layer


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), reference.RATE, reference.MOMENTUM)


def flat(module: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1).double() for p in module.parameters()]).cpu().numpy()


def batch_loss(module: nn.Module, *seed: int) -> torch.Tensor:
    data = torch.from_numpy(reference.draw(*seed)).to(next(module.parameters()))
    inputs, targets = data[:, : reference.INPUTS], data[:, reference.INPUTS :]
    return nn.functional.mse_loss(module(inputs), targets)


def train_by_daso(
    comm: Any, losses: list[float], batches: int, arguments: Any, device: str = "cpu"
) -> np.ndarray:
    """Return what this rank holds after every batch, of all epochs."""
    layer = linear().to(device)
    daso = DASO(sgd(layer), len(losses), comm, **arguments)
    module = DataParallelMultiGPU(layer, daso)
    daso.last_batch = batches
    found = []
    for epoch, loss in enumerate(losses):
        for batch in range(batches):
            daso.zero_grad()
            batch_loss(module, epoch, batch, comm.rank).backward()
            daso.step()
            found.append(flat(layer))
        daso.epoch_loss_logic(loss)
    daso.close()
    return np.array(found)


CYCLE = {"warmup_epochs": 1, "cooldown_epochs": 1, "max_global_skips": 8}
LOSSES = [1.0] * 9  # one of warm-up, with skips of 8, 8, 4, 4, 2, 2, 1, and one of cool-down
LOSSES_BETWEEN = [1.0, 0.5, *[0.25] * 4]


@pytest.mark.parametrize(
    ("nodes", "size", "losses", "batches", "more"),
    [
        pytest.param(2, 2, LOSSES, 11, {"downcast_type": torch.bfloat16}, marks=pytest.mark.slow),
        (2, 2, LOSSES_BETWEEN, 11, {"local_skip_factor": 1, "sending_chunk_size": 7}),
        (2, 2, LOSSES_BETWEEN, 7, {"local_weight": 0.5, "max_global_skips": 5}),
        pytest.param(3, 2, LOSSES_BETWEEN, 10, {}, marks=pytest.mark.slow),
        pytest.param(
            *(3, 2, LOSSES_BETWEEN[:4], 9, {"downcast_type": torch.half, "sending_chunk_size": 5}),
            marks=pytest.mark.slow,
        ),
        (1, 4, LOSSES_BETWEEN, 9, {}),
        (2, 1, LOSSES, 18, {}),
        (2, 1, LOSSES_BETWEEN, 17, {"downcast_type": torch.bfloat16}),
    ],
)
def test_traces(
    shm: RankPool,
    six: RankPool,
    nodes: int,
    size: int,
    losses: list[float],
    batches: int,
    more: dict[str, Any],
) -> None:
    arguments = {**CYCLE, "downcast_type": torch.float, **more}
    pool = six if nodes * size > 4 else shm
    ranks = pool.run(
        train_by_daso, losses, batches, {"node_size": size, **arguments}, size=nodes * size
    )
    found = np.stack(ranks, axis=1)
    cast = arguments.pop("downcast_type")
    arguments.pop("sending_chunk_size", None)
    weight = arguments.pop("local_weight", 2.0)
    expected = reference.trace(nodes, size, losses, batches, weight, **arguments)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-6 if cast == torch.float else 1e-2)


def constants(comm: Any) -> bool:
    module = linear()
    module.register_buffer("constant", torch.rand(1000, generator=torch.Generator().manual_seed(1)))
    before = module.constant.clone()
    with DASO(sgd(module), 1, comm, node_size=comm.size) as daso:
        daso.set_model(module)
        daso.last_batch = 1
        daso.step()
    mean = before.clone()
    comm.all_reduce(mean, "mean")
    assert not torch.equal(mean, before)  # as sums are rounded
    return torch.equal(module.constant, before)


def test_equal_buffers_are_left_alone(six: RankPool) -> None:
    assert all(six.run(constants))
