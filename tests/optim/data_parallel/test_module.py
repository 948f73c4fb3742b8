"""The wrapped module: how it begins and catches up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import Tensor, nn

from optim.torch_cases import (
    Plain,
    assert_replicas_equal,
    batch,
    descend,
    distance,
    loss_of,
    make,
    small_buckets,
    take_step,
    values,
)
from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer

MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])


# --- the beginning ------------------------------------------------------------------------------


class Statistics(Plain):
    """With running statistics and buffers that never change."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("steady", torch.rand(1000))
        self.register_buffer("infinite", torch.tensor([float("inf"), float("-inf")]))
        self.register_buffer("flags", torch.rand(5) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.float()))


@MODES
def test_starts_with_weights_and_buffers_of_rank_0(shm: RankPool, blocking: bool) -> None:
    """And keeps them, as they may be pretrained; parameters beside the module's too."""

    def task(comm: Any) -> None:
        net = make(Statistics, seed=comm.rank)
        beside = nn.Parameter(torch.full((3,), float(comm.rank)))
        net.norm.running_mean.fill_(7 + comm.rank)
        net.norm.num_batches_tracked.fill_(70 + comm.rank)
        first = make(Statistics)
        first.norm.running_mean.fill_(7)
        first.norm.num_batches_tracked.fill_(70)
        addresses = [value.data_ptr() for value in net.state_dict().values()]
        with DataParallel(net, comm, descend([*net.parameters(), beside]), blocking):
            for own, wanted in zip(values(net), values(first), strict=True):
                assert torch.equal(own, wanted)
            assert beside.tolist() == [0, 0, 0]
            assert addresses == [value.data_ptr() for value in net.state_dict().values()]

    shm.run(task, size=3)


@MODES
def test_buffers_are_averaged(shm: RankPool, blocking: bool) -> None:
    """Those that change: the mean of equal numbers would differ from them by rounding."""

    def task(comm: Any) -> None:
        net = make(Statistics)
        steady, infinite = net.steady.clone(), net.infinite.clone()
        assert not torch.equal((steady + steady + steady) / 3, steady)
        optimizer = descend(net.parameters())
        with DataParallel(net, comm, optimizer, blocking) as model:
            mean = torch.zeros(3)
            for step in range(3):
                take_step(comm, model, optimizer, step)
                x = batch(step).float()
                rows = torch.stack([x[r :: comm.size].mean(0) for r in range(comm.size)])
                mean = 0.9 * mean + 0.1 * rows.mean(0)
                model.catch_up()
                assert torch.allclose(net.norm.running_mean, mean, atol=1e-6)
                assert_replicas_equal(comm, net)
                assert not any(model._updates[0]._buffers.flags()), "averaged once for a change"
            if comm.rank == 1:
                net.infinite[0] = 5.0
            take_step(comm, model, optimizer)
        assert net.norm.num_batches_tracked == 4
        assert torch.equal(net.steady, steady)
        assert torch.equal(net.infinite, infinite)  # the mean of infinities and 5
        assert_replicas_equal(comm, net)

    shm.run(task, size=3)


def test_a_world_of_one_reduces_nothing(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        assert comm.backend == "single"
        net, one = make(Plain), make(Plain)
        before = dict(comm._numbers)
        optimizer, serial = descend(net.parameters()), torch.optim.SGD(one.parameters(), lr=0.1)
        with small_buckets() as sizes, DataParallel(net, comm, optimizer) as model:
            for step in range(3):
                take_step(comm, model, optimizer, step)
                serial.zero_grad()
                loss_of(one, batch(step)).backward()
                assert distance(values(net), values(one)) == 0
                serial.step()
        assert distance(values(net), values(one)) == 0
        assert not sizes
        assert dict(comm._numbers) == before

    shm.run(task, size=1)


# --- catching up --------------------------------------------------------------------------------

READINGS: dict[str, Callable[[DataParallel, DataParallelOptimizer], Any]] = {
    "eval": lambda model, optimizer: model.eval(),
    "train(False)": lambda model, optimizer: model.train(False),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
    "parameters": lambda model, optimizer: list(model.parameters()),
    "buffers": lambda model, optimizer: list(model.buffers()),
    "modules": lambda model, optimizer: list(model.modules()),
    "children": lambda model, optimizer: list(model.children()),
    "module": lambda model, optimizer: model.module,
    "to": lambda model, optimizer: model.to(torch.float64),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "close": lambda model, optimizer: model.close(),
    "forward": lambda model, optimizer: model(batch(0)),
    "the module's own forward": lambda model, optimizer: model._modules["module"](batch(0)),
}


def test_what_catches_up(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        one = make(Plain)
        loss_of(one, batch(0)).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        for name, read in READINGS.items():
            net = make(Plain)
            optimizer = descend(net.parameters())
            with DataParallel(net, comm, optimizer) as model:
                take_step(comm, model, optimizer)
                model.zero_grad()
                model.train()
                assert distance(values(net), values(make(Plain))) == 0, name
                assert optimizer.update_next
                read(model, optimizer)
                assert not optimizer.update_next
                assert distance(values(net), values(one)) < 1e-12, name

    shm.run(task, size=2)


@MODES
def test_casting(shm: RankPool, blocking: bool) -> None:
    """Also after a backward that has reduced more on one rank than on the other."""

    def task(comm: Any) -> None:
        net, one = make(Plain).float(), make(Plain).float()
        optimizer, serial = descend(net.parameters()), torch.optim.SGD(one.parameters(), lr=0.1)
        with small_buckets(), DataParallel(net, comm, optimizer, blocking) as model:
            for step in range(4):
                if step == 2:
                    some = net if comm.rank == 0 else net.last
                    x = batch(step).float()
                    loss_of(model, x).backward(inputs=list(some.parameters()))
                    assert model.double() is model
                    one.double()
                x = batch(step).to(one.last.weight.dtype)
                optimizer.zero_grad()
                loss_of(model, x[comm.rank :: comm.size]).backward()
                optimizer.step()
                serial.zero_grad()
                loss_of(one, x).backward()
                serial.step()
        assert net.last.weight.dtype == torch.float64
        assert distance(values(net), values(one)) < 1e-6
        assert_replicas_equal(comm, net)

    shm.run(task, size=2)


def test_loading_wins_over_the_update_that_waits(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        with DataParallel(net, comm, optimizer) as model:
            state = copy.deepcopy(model.state_dict())
            assert all(name.startswith("module.") for name in state)
            take_step(comm, model, optimizer)
            model.load_state_dict(state)
        assert distance(values(net), values(make(Plain))) == 0

    shm.run(task, size=2)


def test_layer_by_layer(shm: RankPool) -> None:
    """Each layer is updated just before it runs, whatever the mode of autograd."""

    def task(comm: Any, context: Any) -> None:
        net = make(Plain)
        optimizer = DataParallelOptimizer(torch.optim.Adam(net.parameters(), lr=0.1))
        seen = []

        def look(part: nn.Module, args: Any) -> None:
            old = values(make(Plain))
            seen.append([not torch.equal(a, b) for a, b in zip(values(net), old, strict=True)])

        for layer in net.children():
            layer.register_forward_pre_hook(look)
        with DataParallel(net, comm, optimizer) as model:
            take_step(comm, model, optimizer)
            seen.clear()
            with context():
                model(batch(0))
            assert seen == [[True] * n + [False] * (6 - n) for n in (2, 4, 6)]
            take_step(comm, model, optimizer)
            model.catch_up()

    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        shm.run(task, context, size=2)


def test_a_layer_that_does_not_run_every_time(shm: RankPool) -> None:
    class Skipping(Plain):
        short = False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            if self.short:
                return self.last(x[:, :4])
            return self.last(torch.tanh(self.second(x)))

    def task(comm: Any) -> None:
        net, one = make(Skipping), make(Skipping)
        optimizer, serial = descend(net.parameters()), torch.optim.SGD(one.parameters(), lr=0.1)
        with DataParallel(net, comm, optimizer) as model:
            for step in range(6):
                net.short = one.short = step in (2, 3, 5)
                model(batch(step))
                assert not optimizer.update_next
                assert (net.second.weight in model._layered) == (not net.short)
                take_step(comm, model, optimizer, step)
                serial.zero_grad()
                loss_of(one, batch(step)).backward()
                assert distance(values(net), values(one)) < 1e-12
                serial.step()
        assert distance(values(net), values(one)) < 1e-12

    shm.run(task, size=2)


def test_one_rank_may_evaluate_alone(shm: RankPool) -> None:
    """And the caller's own operations may come anywhere, whatever ranks differ in."""

    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        with small_buckets(), DataParallel(net, comm, optimizer) as model:
            for step in range(4):
                optimizer.zero_grad()
                hidden = torch.tanh(net.first(batch(step)))
                if step or comm.rank == 0:
                    hidden = net.last(torch.tanh(net.second(hidden)))
                loss = hidden.square().mean()
                loss.backward()
                comm.all_reduce(loss.detach(), "mean")
                optimizer.step()
                comm.barrier()
                if comm.rank == step % 2:
                    model.to(torch.float64)
                    model.eval()
                    model(batch(step))
                    model.train()
                    model.state_dict()
                comm.barrier()
        assert_replicas_equal(comm, net)

    shm.run(task, size=2)


@MODES
def test_several_optimizers(shm: RankPool, blocking: bool) -> None:
    """Train with two that step at different times. Ranks run backward in different orders."""

    def task(comm: Any) -> None:
        def make_optimizers(net: nn.Module) -> tuple[Any, Any]:
            return (
                torch.optim.Adam(net.first.parameters(), lr=0.1),
                torch.optim.SGD([*net.second.parameters(), *net.last.parameters()], lr=0.1),
            )

        net, one = make(Plain), make(Plain)
        own = [DataParallelOptimizer(each) for each in make_optimizers(net)]
        serial = make_optimizers(one)
        with small_buckets(), DataParallel(net, comm, own, blocking) as model:
            for step in range(5):
                loss = loss_of(model, batch(step)[comm.rank :: 2])
                for number in (comm.rank, 1 - comm.rank):
                    loss.backward(inputs=own[number].params_ref, retain_graph=True)
                loss_of(one, batch(step)).backward()
                for number in ([0, 1], [1], [1, 0], [0], [])[step]:
                    for optimizer in (own[number], serial[number]):
                        optimizer.step()
                        optimizer.zero_grad()
        assert distance(values(net), values(one)) < 1e-12

    shm.run(task, size=2)
