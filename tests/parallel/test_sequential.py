"""A pytagi Sequential under dp, ddp and fsdp is the DDPSequential that one makes by hand."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential
from support.rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from parallel.support import flat, launched, torch_group
from tagi_ddp import DDPSequential, accelerate
from tagi_ddp.communicators import as_communicator
from tagi_ddp.parallel import (
    GaussianLoss,
    ParallelConfig,
    Task,
    TaskModel,
    ddp,
    dp,
    fsdp,
    full_state_dict,
)

NOISE = 0.1


class Regression(Task):
    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        return model(batch[0])

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> GaussianLoss:
        return GaussianLoss(model, output, batch[1], NOISE)


def make() -> Any:
    import pytagi

    pytagi.manual_seed(3)
    return Sequential(Linear(3, 9), ReLU(), Linear(9, 2))


def shares(rank: int, size: int) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(5)
    found = []
    for count in (8, 5, 1):  # the last leaves ranks without a sample
        x = random.normal(size=(count, 3)).astype(np.float32)
        y = np.stack([x.sum(1), np.sin(x[:, 0])], 1)
        found.append((np.array_split(x, size)[rank], np.array_split(y, size)[rank]))
    return found


def train_task_model(model: Any, rank: int, size: int) -> list[float]:
    task_model = model if isinstance(model, TaskModel) else TaskModel(Regression(), model)
    losses = []
    for batch in shares(rank, size):
        loss = task_model(batch, None)
        losses.append(float(loss))
        loss.backward()
        task_model.model.step()
    return losses


def by_hand(comm: Any, sharded: bool) -> tuple[Any, list[float]]:
    net = make()
    with DDPSequential(net, average=False, communicator=comm, sharded=sharded) as model:
        losses = train_task_model(model, comm.rank, comm.size)
    return flat(net.state_dict()), losses


def wrap_all(comm: Any) -> int:
    """Compare what each wrapper trains with what is made by hand."""
    expected, losses = by_hand(comm, False)
    assert np.array_equal(by_hand(comm, True)[0], expected)
    tried = 0
    for use_fsdp in (False, True):
        for strategy in ShardingStrategy if use_fsdp else (ShardingStrategy.NO_SHARD,):
            config = ParallelConfig(use_fsdp, sharding_strategy=strategy)
            for wrap in (dp, fsdp if use_fsdp else ddp):
                for in_task in (False, True):
                    net = make()
                    wrapped = wrap(TaskModel(Regression(), net) if in_task else net, config)
                    assert type(wrapped) is (TaskModel if in_task else DDPSequential)
                    model = wrapped.model if in_task else wrapped
                    assert (model.model is net, model.average) == (True, False)
                    sharded = use_fsdp and strategy is not ShardingStrategy.NO_SHARD
                    assert model._reduction.sharded == sharded
                    assert train_task_model(wrapped, comm.rank, comm.size) == losses
                    state = full_state_dict(wrapped)
                    assert bool(state) == (comm.rank == 0)
                    if state:
                        names = {("model." * in_task) + name for name in net.state_dict()}
                        assert set(state) == names
                        assert np.array_equal(flat(state), expected)
                    model.check_replicas()
                    model.close()
                    assert np.array_equal(flat(net.state_dict()), expected)
                    tried += 1
    return tried


def without_torchs_group(comm: Any, job: str) -> int:
    with launched(comm.rank, comm.size, job):
        tried = wrap_all(comm)
    assert not dist.is_initialized()
    return tried


def in_torchs_group(comm: Any, path: str, backend: str) -> int:
    with torch_group(comm, path, backend):
        return wrap_all(comm)


def test_by_the_launchers_variables(shm: RankPool) -> None:
    assert shm.run(without_torchs_group, secrets.token_hex(4), size=2) == [24, 24]


@pytest.mark.parametrize("backend", ["tagi_ddp", "gloo"])
def test_by_torchs_group(shm: RankPool, backend: str, tmp_path: Path) -> None:
    assert shm.run(in_torchs_group, str(tmp_path / "f"), backend, size=3) == [24] * 3


def borrow(comm: Any, path: str) -> None:
    """Ask for the communicators of the default group and of another."""
    with torch_group(comm, path):
        other = dist.new_group([1, 0])
        for group in (dist.group.WORLD, other):
            assert as_communicator(group) is group.communicator
            assert as_communicator(group).rank == group.rank()
        with DDPSequential(make(), average=False, communicator=dist.group.WORLD) as model:
            assert model.communicator is dist.group.WORLD.communicator
            train_task_model(model, comm.rank, comm.size)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)  # it is open still
        assert tensor.tolist() == [2.0] * 3
        kept = as_communicator(dist.group.WORLD)
    with pytest.raises(Exception, match="closed"):
        kept.barrier()


def test_the_groups_communicator_is_shared(shm: RankPool, tmp_path: Path) -> None:
    shm.run(borrow, str(tmp_path / "f"), size=2)


def test_one_process() -> None:
    net = make()
    assert dp(net, ParallelConfig()) is net
    task_model: TaskModel[Any, Any, Any, Any] = TaskModel(Regression(), net)
    assert dp(task_model, ParallelConfig(use_fsdp=True)) is task_model
    losses = train_task_model(task_model, 0, 1)
    accelerated = make()
    with accelerate(accelerated) as model:
        np.testing.assert_allclose(train_task_model(model, 0, 1), losses, rtol=1e-4)
    np.testing.assert_allclose(
        flat(accelerated.state_dict()), flat(net.state_dict()), rtol=1e-3, atol=1e-5
    )
    with ddp(make(), ParallelConfig()) as model:  # without asking for the number of processes
        assert model.communicator.size == 1


@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_what_does_not_apply(wrap: Any) -> None:
    with pytest.raises(ValueError, match="cpu_offload must be False for a pytagi Sequential"):
        wrap(make(), ParallelConfig(cpu_offload=True))
    with pytest.raises(ValueError, match="sync_module_states must be True for a pytagi Sequ"):
        wrap(make(), ParallelConfig(sync_module_states=False))

    class WithScale(nn.Module, Task):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(ValueError, match="task has parameters of torch beside a pytagi Seq"):
        wrap(TaskModel(WithScale(), make()), ParallelConfig())
    with accelerate(make()) as model, pytest.raises(ValueError, match="is a DDPSequential"):
        wrap(model, ParallelConfig())


# --- the likelihood --------------------------------------------------------------------------


def test_gaussian_loss() -> None:
    net = make()
    [(x, y), *_] = shares(0, 1)
    mean, variance = (part.reshape(-1, 2) for part in net(x))
    normal = torch.distributions.Normal(
        torch.tensor(mean).double(), torch.tensor(variance).double().add(NOISE).sqrt()
    )
    expected = -normal.log_prob(torch.tensor(y)).sum(1).mean().item()
    for targets in (y, torch.tensor(y)):
        for noise in (NOISE, np.full(y.shape, NOISE)):
            loss = GaussianLoss(net, (mean.ravel(), variance.ravel()), targets, noise)
            assert loss.item() == float(loss) == pytest.approx(expected, rel=1e-6)
    hidden = y.copy()
    hidden[0] = np.nan
    expected -= -normal.log_prob(torch.tensor(y))[0].sum().item() / len(y)
    loss = GaussianLoss(net, (mean.ravel(), variance.ravel()), hidden, NOISE)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    mean[1, 0] = np.nan  # an output, which is no reason to leave the observation out
    assert np.isnan(GaussianLoss(net, (mean.ravel(), variance.ravel()), hidden, NOISE).item())


def test_gaussian_loss_goes_backward_as_the_engines_updater() -> None:
    nets = [make() for _ in range(2)]
    [(x, y), *_] = shares(0, 1)
    noise = np.linspace(0.1, 0.5, y.size, dtype=np.float32)
    GaussianLoss(nets[0], nets[0](x), y, noise).backward()
    nets[1](x)
    updater = OutputUpdater("cpu")
    updater.update(nets[1].output_z_buffer, y.ravel(), noise, nets[1].input_delta_z_buffer)
    nets[1].backward()
    for net in nets:
        net.step()
    assert np.array_equal(*(flat(net.state_dict()) for net in nets))


@pytest.mark.parametrize(
    ("targets", "variance", "text"),
    [
        (np.ones(3), 1.0, "targets must have one element for each of 16 outputs, got 3"),
        (np.ones((8, 2)), 0.0, "variance must be a positive number, .* got 0.0"),
        (np.ones((8, 2)), [1.0, 2.0], "variance must be .* one for each observation"),
        (np.ones((8, 2)), np.nan, "variance must be a positive number"),
    ],
)
def test_what_the_loss_refuses(targets: Any, variance: Any, text: str) -> None:
    net = make()
    with pytest.raises(ValueError, match=text):
        GaussianLoss(net, net(shares(0, 1)[0][0]), targets, variance)
