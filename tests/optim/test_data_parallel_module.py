"""The wrapped module: how it begins, catches up, fails and ends."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from optim.torch_cases import (
    Plain,
    assert_replicas_equal,
    batch,
    distance,
    loss_of,
    make,
    small_buckets,
    values,
)
from tagi_ddp.communicators import PeerLost
from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer

MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])


def descend(params: Any, lr: float = 0.1) -> DataParallelOptimizer:
    return DataParallelOptimizer(torch.optim.SGD(params, lr=lr))


def learn(comm: Any, model: nn.Module, optimizer: DataParallelOptimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, batch(step)[comm.rank :: comm.size]).backward()
    optimizer.step()


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
                learn(comm, model, optimizer, step)
                x = batch(step).float()
                rows = torch.stack([x[r :: comm.size].mean(0) for r in range(comm.size)])
                mean = 0.9 * mean + 0.1 * rows.mean(0)
                model.catch_up()
                assert torch.allclose(net.norm.running_mean, mean, atol=1e-6)
                assert_replicas_equal(comm, net)
            if comm.rank == 1:
                net.infinite[0] = 5.0
            learn(comm, model, optimizer)
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
                learn(comm, model, optimizer, step)
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
                learn(comm, model, optimizer)
                model.zero_grad()
                model.train()
                assert distance(values(net), values(make(Plain))) == 0, name
                assert optimizer.update_next
                read(model, optimizer)
                assert not optimizer.update_next
                assert distance(values(net), values(one)) < 1e-12, name

    shm.run(task, size=2)


def test_loading_wins_over_the_update_that_waits(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        with DataParallel(net, comm, optimizer) as model:
            state = copy.deepcopy(model.state_dict())
            assert all(name.startswith("module.") for name in state)
            learn(comm, model, optimizer)
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
            learn(comm, model, optimizer)
            seen.clear()
            with context():
                model(batch(0))
            assert seen == [[True] * n + [False] * (6 - n) for n in (2, 4, 6)]
            learn(comm, model, optimizer)
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
                learn(comm, model, optimizer, step)
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
                    model.eval()
                    model(batch(step))
                    model.train()
                    model.state_dict()
                comm.barrier()
        assert_replicas_equal(comm, net)

    shm.run(task, size=2)


@MODES
def test_several_optimizers(shm: RankPool, blocking: bool) -> None:
    """Which step at different times and in any order."""

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
                loss_of(model, batch(step)[comm.rank :: 2]).backward()
                loss_of(one, batch(step)).backward()
                for number in ([0, 1], [1], [1, 0], [0], [])[step]:
                    for optimizer in (own[number], serial[number]):
                        optimizer.step()
                        optimizer.zero_grad()
        assert distance(values(net), values(one)) < 1e-12

    shm.run(task, size=2)


# --- failing and ending -------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("where", ["forward", "step", "block"])
def test_an_error_reaches_all_ranks(shm: RankPool, where: str, blocking: bool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        torch_optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DataParallelOptimizer(torch_optimizer)

        def fail(*args: Any) -> None:
            raise ValueError("out of cheese")

        def run() -> None:
            with DataParallel(net, comm, optimizer, blocking) as model:
                learn(comm, model, optimizer)
                if comm.rank == 1 and where == "forward":
                    net.second.register_forward_pre_hook(fail)
                if comm.rank == 1 and where == "step":
                    torch_optimizer.register_step_pre_hook(fail)
                if comm.rank == 1 and where == "block":
                    fail()
                for step in range(3):
                    learn(comm, model, optimizer, step)

        if comm.rank == 1:
            with pytest.raises(ValueError, match="out of cheese"):
                run()
        else:
            with pytest.raises(PeerLost, match="rank 1 gave up: ValueError: out of cheese"):
                run()
        with pytest.raises(PeerLost, match="out of cheese"):
            comm.barrier()

    shm.run(task, size=2, fresh=True, timeout=10.0)


def test_the_end(shm: RankPool) -> None:
    """The module and the optimizer go on alone, or in another group."""

    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        model = DataParallel(net, comm, optimizer)
        with pytest.raises(ValueError, match="optimizer belongs to another DataParallel"):
            DataParallel(net, comm, optimizer)
        learn(comm, model, optimizer)
        model.close()
        model.close()
        after = values(net)
        assert torch.equal(model(batch(0)), net(batch(0)))
        loss_of(net, batch(0)).backward()
        with pytest.raises(RuntimeError, match="step\\(\\) needs an open DataParallel"):
            optimizer.step()
        assert distance(values(net), after) == 0
        for part in net.modules():
            assert not part._forward_pre_hooks
            assert not part._forward_hooks
        with DataParallel(net, comm, optimizer, blocking=True) as model:
            learn(comm, model, optimizer)
        assert distance(values(net), after) > 0
        comm.barrier()  # which stays open

    shm.run(task, size=2)


def test_copies_belong_to_nobody(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        with warnings.catch_warnings(), DataParallel(net, comm, optimizer) as model:
            warnings.simplefilter("error")
            learn(comm, model, optimizer)
            file = io.BytesIO()
            cloudpickle.dump(net, file)  # the class travelled by value
            file.seek(0)
            for copied in (copy.deepcopy(net), cloudpickle.load(file)):
                loss_of(copied, batch(0)).backward()
                assert optimizer.update_next
                assert distance(values(copied), values(net)) == 0

    shm.run(task, size=2)


# --- arguments ----------------------------------------------------------------------------------


def wrong_types(comm: Any) -> None:
    net = make(Plain)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = DataParallelOptimizer(sgd)
    module, opt = lambda *args: DataParallel(*args), DataParallelOptimizer
    for make_it, args, error in (
        (opt, (net,), "torch_optimizer must be a torch.optim.Optimizer, got Plain"),
        (opt, (optimizer,), "torch_optimizer must be a torch.optim.Optimizer, got DataParallelOpt"),
        (opt, (sgd, 1), "blocking must be a bool, got 1"),
        (module, (len, comm, optimizer), "module must be a torch.nn.Module, got builtin"),
        (module, (net, "shm", optimizer), "expected a communicator"),
        (module, (net, comm, sgd), "optimizer must be a DataParallelOptimizer or several, got SGD"),
        (module, (net, comm, [optimizer, sgd]), "DataParallelOptimizers only, got SGD"),
        (module, (net, comm, optimizer, "no"), "blocking must be a bool, got 'no'"),
    ):
        with pytest.raises(TypeError, match=re.escape(error)):
            make_it(*args)
    with pytest.raises(TypeError, match="without a closure, but LBFGS needs one"):
        DataParallelOptimizer(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ValueError, match="at least one DataParallelOptimizer, got none"):
        DataParallel(net, comm, [])
    with pytest.raises(ValueError, match="optimizer must not hold a parameter twice"):
        DataParallel(net, comm, [optimizer, DataParallelOptimizer(sgd)])
    assert not optimizer.attached


def test_wrong_types(shm: RankPool) -> None:
    """Optimizers that need a closure are refused too."""
    shm.run(wrong_types, size=1)


def test_public_attributes(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DataParallelOptimizer(sgd, True)
        assert optimizer.torch_optimizer is sgd
        assert optimizer.blocking_parameter_updates is True
        assert optimizer.update_next is False
        assert all(a is b for a, b in zip(optimizer.params_ref, net.parameters(), strict=True))
        assert optimizer.param_groups is sgd.param_groups
        with DataParallel(net, comm, optimizer):
            assert optimizer.blocking_parameter_updates is False, "DataParallel overrides"

    shm.run(task, size=1)


@MODES
def test_sparse_gradients_are_refused(shm: RankPool, blocking: bool) -> None:
    def task(comm: Any) -> None:
        net = nn.Embedding(3, 2, sparse=True)
        optimizer = descend(net.parameters())

        def run() -> None:
            with DataParallel(net, comm, optimizer, blocking) as model:
                model(torch.tensor([1])).sum().backward()
                optimizer.step()

        with pytest.raises((TypeError, PeerLost), match="must be dense"):
            run()

    shm.run(task, size=2, fresh=True)
