"""Calls of torch's users over NCCL, on GPUs: as on the CPU.

Two ranks share the GPU if there is one only. All is in one file, as each start of ranks takes
longer than most of these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from optim.daso.test_daso import CYCLE, LOSSES_BETWEEN, train_by_daso
from optim.data_parallel.test_data_parallel import MODES, all_optimizers
from sharding.test_graph import check_graph
from sharding.test_transformer import check_transformer
from strategy.sharded import CHANNELS, NODES, Net, draw
from strategy.test_gradients import worst
from strategy.test_group_strategy import ensemble, one_network
from support.devices import Devices
from support.networks import distance
from support.rank_pool import RankPool
from torch.distributed.fsdp import ShardingStrategy

from parallel.support import torch_group
from parallel.test_wrappers import check_parameters, make, train_wrapped
from tagi_ddp.parallel import ParallelConfig, fsdp
from tagi_ddp.sharding.groups import communicator

TWO = pytest.mark.parametrize("gpu", [pytest.param(2, marks=pytest.mark.gpu)], indirect=True)


def here(comm: Any, task: Callable[..., Any], *args: Any) -> Any:
    """Run a task on tensors that lie where the communicator's buffers do."""
    return task(comm, *args, device=comm.device)


# --- sharding -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("check_all", "cases"), [(check_graph, 50), (check_transformer, 30)])
def test_sharding(devices: Devices, check_all: Callable[..., int], cases: int) -> None:
    """Exact, forward and backward, for all dtypes, dimensions and layouts."""
    task = (check_all,) if devices.stand_in else (here, check_all)
    assert min(devices.pool.run(*task, size=devices.ranks(3), limit=60)) > cases


def split_by_torch(comm: Any, path: str) -> None:
    x = draw(torch.Generator().manual_seed(0), 2, NODES, CHANNELS)
    split, whole = Net(seed=1).to(comm.device), Net(seed=1)
    with torch_group(comm, path, "gloo"):
        group = dist.group.WORLD
        found = split(x.to(comm.device), group)
        assert communicator(group, found.device).backend == "nccl"
    torch.testing.assert_close(found.cpu(), whole(x), rtol=1e-10, atol=1e-10)


@TWO
def test_sharding_by_a_process_group(gpu: RankPool, tmp_path: Path) -> None:
    """Tensors on GPUs do not go by way of the host, though torch's own group is one of the host."""
    gpu.run(split_by_torch, str(tmp_path / "f"))


# --- optim --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one_node", "cast"), [(True, torch.float), (False, torch.float), (False, torch.bfloat16)]
)
def test_daso(gpu: RankPool, shm: RankPool, one_node: bool, cast: torch.dtype) -> None:
    """Every parameter after every batch; each rank is a node, or all of them are one."""
    arguments = {**CYCLE, "node_size": gpu.size if one_node else 1, "downcast_type": cast}
    task = (here, train_by_daso, LOSSES_BETWEEN, 9, arguments)
    ours, theirs = gpu.run(*task), shm.run(*task, size=gpu.size)
    atol = 1e-5 if cast == torch.float else 1e-2  # a number may be rounded to the next one
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=atol)


@MODES
def test_data_parallel(gpu: RankPool, shm: RankPool, blocking: bool) -> None:
    """Each step is that of serial training on the same GPU, and the end as on the CPU."""
    ours = gpu.run(here, all_optimizers, blocking, limit=60)
    theirs = shm.run(here, all_optimizers, blocking, size=gpu.size)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


# --- strategy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_of_groups(gpu: RankPool, apart: bool) -> None:
    """A model that is split over the ranks, or an ensemble with a member on each."""
    sizes = (1, gpu.size) if apart else (gpu.size, None)
    for distances in gpu.run(here, worst, *sizes):
        assert max(distances.values()) < 1e-10, distances


@TWO
def test_one_network(gpu: RankPool, shm: RankPool) -> None:
    ours, theirs = gpu.run(one_network, limit=60), shm.run(one_network, size=2)
    for (_, trained, _), (_, expected, _) in zip(ours, theirs, strict=True):
        assert distance(trained, ours[0][1]) == 0
        assert distance(trained, expected) < 1e-4


def test_members_train_apart(gpu: RankPool, shm: RankPool) -> None:
    ours = gpu.run(ensemble, 1, gpu.size, limit=60)
    theirs = shm.run(ensemble, 1, gpu.size, size=gpu.size)
    for (member, _, trained, _, mixed), other in zip(ours, theirs, strict=True):
        assert member == other[0]
        assert distance(trained, other[2]) < 1e-4
        torch.testing.assert_close(mixed, other[4], rtol=1e-4, atol=1e-5)


# --- parallel -----------------------------------------------------------------------------------


def offloaded(comm: Any, path: str) -> None:
    """Train with parameters, gradients and the optimizer's state in the host's memory."""
    expected = make(0)
    train_wrapped(expected, 0, 1, "none")
    torch.cuda.set_device(comm.device)
    with torch_group(comm, path):
        for strategy in (
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        ):
            for accumulation in ("none", "no_sync"):
                config = ParallelConfig(True, True, strategy)
                model = fsdp(make(comm.rank).to(comm.device), config)
                optimizer = train_wrapped(model, comm.rank, comm.size, accumulation, comm.device)
                held = [*model.parameters()]
                held += [p.grad for p in held if p.grad is not None]  # where a rank has a part
                held += [value for state in optimizer.state.values() for value in state.values()]
                assert {tensor.device.type for tensor in held} == {"cpu"}
                check_parameters(comm, model, expected, f"{strategy} {accumulation}")
        with pytest.raises(RuntimeError, match="with cpu_offload a second backward"):
            train_wrapped(model, comm.rank, comm.size, "plain", comm.device)


def test_offload(gpu: RankPool, tmp_path: Path) -> None:
    gpu.run(offloaded, str(tmp_path / "f"), limit=60)
