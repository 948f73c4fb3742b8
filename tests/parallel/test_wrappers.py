"""Torch modules under ddp and fsdp: every strategy is serial training on the union batch."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytagi.nn import Linear, Sequential
from support.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from parallel.support import assert_equal_on_all, torch_group
from tagi_ddp.optim import DataParallel, DataParallelOptimizer
from tagi_ddp.parallel import ParallelConfig, Task, TaskModel, ddp, dp, fsdp, full_state_dict
from tagi_ddp.parallel.groups import node_groups
from tagi_ddp.parallel.wrappers import refuse_lost_gradients

STEPS, SAMPLES = 3, 8
STRATEGIES = list(ShardingStrategy)
ACCUMULATIONS = ("none", "no_sync", "plain")
# And whether FSDP offloads, which torch cannot do when gradients accumulate outside of no_sync().
MANNERS = (("none", False), ("none", True), ("no_sync", True), ("plain", False))


class Squares(Task):
    def run_model(self, model: Any, batch: Any, state: Any) -> Tensor:
        return model(batch[0])

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Tensor) -> Tensor:
        return (output - batch[1]).square().mean()


def make(seed: int) -> nn.Module:
    """An odd number of parameters, a buffer, and a task."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model.register_buffer("offset", torch.randn(3, dtype=torch.float64))
    return TaskModel(Squares(), model)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [
        (torch.randn(SAMPLES, 5).double(), torch.randn(SAMPLES, 3).double()) for _ in range(STEPS)
    ]


def train_wrapped(
    model: nn.Module, rank: int, size: int, accumulation: str, device: str = "cpu"
) -> torch.optim.Optimizer:
    """Train on a rank's shares, each in one piece or in two; return the optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for x, y in batches():
        optimizer.zero_grad()
        x, y = (tensor.chunk(size)[rank].to(device) for tensor in (x, y))
        if accumulation != "none":
            waiting: Any = getattr(model, "no_sync", contextlib.nullcontext)
            half = len(x) // 2
            with waiting() if accumulation == "no_sync" else contextlib.nullcontext():
                (model((x[:half], y[:half]), None) / 2).backward()
            (model((x[half:], y[half:]), None) / 2).backward()
        else:
            model((x, y), None).backward()
        optimizer.step()
    return optimizer


def check_parameters(comm: Any, model: nn.Module, expected: nn.Module, what: str) -> None:
    """Compare the gathered parameters with serial training's, and the ranks with each other."""
    state = full_state_dict(model)
    assert bool(state) == (comm.rank == 0)
    plain = make(99)
    if comm.rank == 0:
        plain.load_state_dict(state, strict=True)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=what)
    if isinstance(model, FullyShardedDataParallel):
        gathered = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    else:
        gathered = contextlib.nullcontext()
    with gathered:
        tensors = [p.detach().to(comm.device, copy=True) for p in model.parameters()]
    assert sum(t.numel() for t in tensors) == sum(p.numel() for p in plain.parameters())
    assert_equal_on_all(comm, tensors)


def train_all(comm: Any, path: str, sync: bool) -> int:
    """Train by every strategy, with and without offloading, in one and in several pieces."""
    expected = make(0)
    train_wrapped(expected, 0, 1, "none")
    tried = 0
    seed = comm.rank if sync else 0  # rank 0's weights win

    def attempt(wrap: Callable[[nn.Module], nn.Module], accumulation: str, what: str) -> None:
        nonlocal tried
        model = wrap(make(seed))
        train_wrapped(model, comm.rank, comm.size, accumulation)
        check_parameters(comm, model, expected, f"{what} {accumulation}")
        tried += 1

    with torch_group(comm, path):
        for accumulation in ACCUMULATIONS:
            config = ParallelConfig(sync_module_states=sync)
            attempt(lambda model, config=config: ddp(model, config), accumulation, "ddp")
        for strategy in STRATEGIES:
            hybrid = "HYBRID" in strategy.name
            for node_size in (1, 2, comm.size) if hybrid and comm.size == 4 else (None,):
                for accumulation, offload in MANNERS:
                    config = ParallelConfig(True, offload, strategy, sync)
                    attempt(
                        lambda model, config=config, node_size=node_size: fsdp(
                            model, config, node_size=node_size
                        ),
                        accumulation,
                        f"{strategy} nodes of {node_size}",
                    )
    return tried


@pytest.mark.parametrize(
    ("size", "sync"),
    [(1, True), (2, True), (2, False), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_training_is_serial_training(shm: RankPool, size: int, sync: bool, tmp_path: Path) -> None:
    tried = shm.run(train_all, str(tmp_path / "f"), sync, size=size, limit=90)
    assert tried == [3 + 4 * (9 if size == 4 else 5)] * size


def look_before_training(comm: Any, path: str) -> None:
    """Look at parameters and buffers before any training."""
    with torch_group(comm, path):
        for sync in (True, False):
            for wrap in (ddp, fsdp):
                for strategy in STRATEGIES if wrap is fsdp else STRATEGIES[:1]:
                    config = ParallelConfig(False, False, strategy, sync)
                    wrapped = wrap(make(comm.rank), config)
                    kind = DistributedDataParallel if wrap is ddp else FullyShardedDataParallel
                    assert type(wrapped) is kind
                    shown = make(0 if sync else comm.rank)
                    buffers = [*wrapped.buffers()]
                    assert torch.equal(buffers[0], next(shown.buffers())) or (
                        wrap is ddp and not sync  # whose buffers are always rank 0's
                    )
                    whole = wrap is ddp or strategy is ShardingStrategy.NO_SHARD
                    if whole:
                        for one, other in zip(
                            wrapped.parameters(), shown.parameters(), strict=True
                        ):
                            assert torch.equal(one, other)
                    else:
                        own = sum(p.numel() for p in wrapped.parameters())
                        all_of_it = sum(p.numel() for p in shown.parameters())
                        assert own < all_of_it


def test_what_training_begins_with(shm: RankPool, tmp_path: Path) -> None:
    shm.run(look_before_training, str(tmp_path / "f"), size=2)


def nested(comm: Any, path: str) -> None:
    """Wrap parts before the whole, and count the groups that nodes make."""
    expected = make(0)
    train_wrapped(expected, 0, 1, "none")
    with torch_group(comm, path):
        made = []
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
            config = ParallelConfig(True, sharding_strategy=strategy)
            for _ in range(2):
                model = make(comm.rank)
                model.model[0] = fsdp(model.model[0], config, node_size=2)
                wrapped = fsdp(model, config, node_size=2)
                train_wrapped(wrapped, comm.rank, comm.size, "none")
                check_parameters(comm, wrapped, expected, "nested")
                made.append(len(dist.distributed_c10d._world.pg_map))
        assert made[2] == made[3] > made[1] == made[0] == 1
        shard, replicate = node_groups(2)
        assert (shard.size(), replicate.size()) == (2, 2)
        assert dist.get_process_group_ranks(shard) == [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1]
        assert dist.get_process_group_ranks(replicate) == [comm.rank % 2, comm.rank % 2 + 2]
        assert node_groups(1) is None
        with pytest.raises(ValueError, match="node_size is 3, but 4 ranks do not make equal"):
            node_groups(3)


def test_parts_and_nodes(shm: RankPool, tmp_path: Path) -> None:
    shm.run(nested, str(tmp_path / "f"), size=4)


def world_of_one(comm: Any, path: str) -> None:
    model, config = nn.Linear(2, 2), ParallelConfig(use_fsdp=True)
    assert dp(model, config) is model
    launcher = {"TAGI_DDP_RANK": "0", "TAGI_DDP_WORLD_SIZE": "2", "TAGI_DDP_LOCAL_RANK": "0"}
    launcher["TAGI_DDP_LOCAL_WORLD_SIZE"] = "2"
    with torch_group(comm, path):
        os.environ.update(launcher)  # another size than the group's, which counts
        try:
            assert dp(model, config) is model
        finally:
            for name in launcher:
                del os.environ[name]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(fsdp(nn.Linear(2, 2), config), FullyShardedDataParallel)


def choose(comm: Any, path: str) -> None:
    with torch_group(comm, path):
        kinds = [type(dp(nn.Linear(2, 2), ParallelConfig(use))) for use in (False, True)]
        assert kinds == [DistributedDataParallel, FullyShardedDataParallel]


def test_dp(shm: RankPool, tmp_path: Path) -> None:
    shm.run(world_of_one, str(tmp_path / "one"), size=1)
    shm.run(choose, str(tmp_path / "two"), size=2)


def lost(comm: Any, path: str) -> None:
    """Go on from gradients that torch, offloading, would replace."""
    x, y = batches()[0]
    with torch_group(comm, path):
        model = fsdp(make(0), ParallelConfig(True))
        refuse_lost_gradients(model)
        for set_to_none in (True, False):
            train_wrapped(model, comm.rank, comm.size, "no_sync")
            model.zero_grad(set_to_none)
            model((x, y), None).backward()
            model.zero_grad(set_to_none)
        model((x, y), None).backward()
        with pytest.raises(RuntimeError, match="with cpu_offload a second backward"):
            model((x, y), None).backward()
        model.zero_grad()
        loss = model((x, y), None)
        for parameter in model.parameters():  # as one rank on a GPU shows them
            parameter.grad = torch.ones_like(parameter)
        loss.backward()


def test_gradients_that_offloading_would_lose(shm: RankPool, tmp_path: Path) -> None:
    shm.run(lost, str(tmp_path / "f"), size=2)


def settings_of_all_kinds(comm: Any, path: str) -> None:
    with torch_group(comm, path):
        for given, kind in (
            (None, DistributedDataParallel),
            ({}, DistributedDataParallel),
            ({"use_fsdp": "yes", "sharding_strategy": "FULL_SHARD"}, FullyShardedDataParallel),
        ):
            assert type(dp(nn.Linear(2, 2), given)) is kind
        assert type(ddp(nn.Linear(2, 2))) is DistributedDataParallel
        assert fsdp(nn.Linear(2, 2), {"sharding_strategy": 3}).sharding_strategy.value == 3
        check_wrong_settings()


def check_wrong_settings() -> None:
    for wrap in (dp, ddp, fsdp):
        with pytest.raises(TypeError, match="cfg must be a ParallelConfig, a mapping or None, got"):
            wrap(nn.Linear(2, 2), True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"cfg\.use_fdsp is no setting; there are use_fsdp"):
            wrap(nn.Linear(2, 2), {"use_fdsp": True})
        with pytest.raises(TypeError, match=r"cfg\.use_fsdp must be true or false, got 'maybe'"):
            wrap(nn.Linear(2, 2), {"use_fsdp": "maybe"})


def wrong_on_one_rank(comm: Any, path: str) -> list[str]:
    """Return the errors of calls that are wrong on one rank. All raise; the group stays usable."""
    one, texts = comm.rank == 1, []
    with torch_group(comm, path):
        wrapped = ddp(nn.Linear(2, 2))
        for wrap in (dp, ddp, fsdp):
            for model, cfg in (
                (nn.Linear(2, 2), {"use_fdsp": True} if one else None),
                (wrapped if one else nn.Linear(2, 2), None),
                (Sequential(Linear(2, 2)), {"cpu_offload": one}),
            ):
                with pytest.raises(ValueError, match=r"^(rank 1: )?(cfg|model|cpu_)") as caught:
                    wrap(model, cfg)
                texts.append(str(caught.value))
        dist.barrier()
    return texts


def test_what_is_wrong_on_one_rank(shm: RankPool, tmp_path: Path) -> None:
    told, own = shm.run(wrong_on_one_rank, str(tmp_path / "f"), size=2)
    assert told == [f"rank 1: {text}" for text in own]


def test_settings(shm: RankPool, tmp_path: Path) -> None:
    shm.run(settings_of_all_kinds, str(tmp_path / "f"), size=2)
    check_wrong_settings()  # in one process, too


class Branches(nn.Module):
    """The second branch is used by one rank, the third by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found: Tensor = self.branches[0](x)
        return found + self.branches[1](x) if both else found


def unused(comm: Any, path: str) -> None:
    """Parameters that a rank does not use, by each way to say so."""
    name = "find_unused_parameters"
    with torch_group(comm, path):
        for wrap, cfg, arguments in (
            (dp, ParallelConfig(find_unused_parameters=True, bucket_cap_mb=1), {}),
            (dp, None, {name: True, "device_ids": None, "process_group": dist.group.WORLD}),
            (ddp, {name: "yes", "broadcast_buffers": False}, {}),
            (ddp, {name: False, "gradient_as_bucket_view": True}, {name: True}),
        ):
            torch.manual_seed(0)
            net = Branches()
            model = wrap(net, cfg, **arguments)
            for _ in range(2):  # without the setting torch refuses the second forward
                model.zero_grad()
                model(torch.ones(4, 2), comm.rank == 1).mean().backward()
            grads = [branch.weight.grad for branch in net.branches]
            assert [None if g is None else g.tolist() for g in grads[:2]] == [
                [[1, 1]],
                [[0.5, 0.5]],
            ]
            assert grads[2] is None or not grads[2].any()


def test_parameters_that_a_rank_does_not_use(shm: RankPool, tmp_path: Path) -> None:
    shm.run(unused, str(tmp_path / "f"), size=2)


def test_settings_of_ddp_are_refused_where_they_would_do_nothing() -> None:
    """In one process, too, as the script is for several."""
    unused = {"find_unused_parameters": True}
    with pytest.raises(ValueError, match=r"find_unused_parameters .* with use_fsdp, got True"):
        dp(nn.Linear(2, 2), {**unused, "use_fsdp": True})
    with pytest.raises(ValueError, match=r"static_graph .* with use_fsdp, got False"):
        dp(nn.Linear(2, 2), {"use_fsdp": True}, static_graph=False)
    with pytest.raises(ValueError, match=r"bucket_cap_mb .* for fsdp, got 3"):
        fsdp(nn.Linear(2, 2), {"bucket_cap_mb": 3})
    with pytest.raises(ValueError, match=r"find_unused_parameters .* for a pytagi Sequential"):
        ddp(Sequential(Linear(2, 2)), unused)
    for name in ("find_unused", "init_sync", "module"):
        with pytest.raises(TypeError, match=f"{name} is no argument .* there are device_ids"):
            dp(nn.Linear(2, 2), **{name: True})
    with pytest.raises(ValueError, match="bucket_cap_mb must be at least 1, got 0"):
        ParallelConfig(bucket_cap_mb=0)


def wrap_twice(comm: Any, path: str) -> None:
    whole = ParallelConfig(True, sharding_strategy=ShardingStrategy.FULL_SHARD)
    wraps = (dp, ddp, lambda model: dp(model, whole), lambda model: fsdp(model, whole))
    with torch_group(comm, path):
        net = nn.Linear(2, 2)
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters()))
        for one in (
            ddp(nn.Linear(2, 2)),
            fsdp(nn.Linear(2, 2), whole),
            DataParallel(net, dist.group.WORLD, optimizer, blocking=True),
        ):
            kind = type(one).__name__
            for wrap in wraps:
                with pytest.raises(ValueError, match=f"model must not be .* is one, a {kind}:"):
                    wrap(one)
            with pytest.raises(ValueError, match=f"model must .* has one at 'model', a {kind}"):
                ddp(TaskModel(Squares(), one))
        network = ddp(Sequential(Linear(2, 2)))
        for wrap in wraps:
            for model in (network, TaskModel(Task(), network)):
                with pytest.raises(ValueError, match=r"model must not .* but is a DDPSequential"):
                    wrap(model)
        dist.barrier()


def test_what_is_wrapped_already(shm: RankPool, tmp_path: Path) -> None:
    shm.run(wrap_twice, str(tmp_path / "f"), size=2)


@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_what_is_no_model(wrap: Callable[..., Any]) -> None:
    with pytest.raises(
        TypeError, match=r"model must be a torch\.nn\.Module, .*, got a SimpleNamesp"
    ):
        wrap(SimpleNamespace(), ParallelConfig())
    with pytest.raises(TypeError, match="got a TaskModel over a int"):
        wrap(TaskModel(Task(), 3), ParallelConfig())
