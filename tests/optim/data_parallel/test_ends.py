"""Failures of a wrapped module, its end, and wrong arguments."""

from __future__ import annotations

import copy
import gc
import io
import re
import warnings
import weakref
from typing import Any

import cloudpickle
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
    take_step,
    values,
)
from tagi_ddp.communicators import CommunicatorError, PeerLost
from tagi_ddp.optim.daso import DASO, DataParallelMultiGPU
from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer, module

MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])


@MODES
@pytest.mark.parametrize("where", ["forward", "step", "block"])
def test_an_error_reaches_all_ranks(shm: RankPool, where: str, blocking: bool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        torch_optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DataParallelOptimizer(torch_optimizer)

        def fail(*args: Any) -> None:
            raise ValueError("out of cheese")

        def run(model: DataParallel) -> None:
            take_step(comm, model, optimizer)
            if comm.rank == 1 and where == "forward":
                net.second.register_forward_pre_hook(fail)
            if comm.rank == 1 and where == "step":
                torch_optimizer.register_step_pre_hook(fail)
            if comm.rank == 1 and where == "block":
                fail()
            for step in range(3):
                take_step(comm, model, optimizer, step)

        def start() -> None:
            model = DataParallel(net, comm, optimizer, blocking)
            if where == "block":
                with model:
                    run(model)
            else:
                run(model)

        if comm.rank == 1:
            with pytest.raises(ValueError, match="out of cheese"):
                start()
        else:
            with pytest.raises(PeerLost, match="rank 1 gave up: ValueError: out of cheese"):
                start()
        with pytest.raises(PeerLost, match="out of cheese"):
            comm.barrier()

    shm.run(task, size=2, fresh=True, timeout=10.0)


def test_the_end(shm: RankPool) -> None:
    """The module and the optimizer go on alone, or in another group."""

    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        model = DataParallel(net, comm, optimizer)
        take_step(comm, model, optimizer)
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
            take_step(comm, model, optimizer)
        assert distance(values(net), after) > 0
        comm.barrier()  # which stays open

    shm.run(task, size=2)


@MODES
def test_wrapping_a_module_again_closes_what_has_its_optimizer(
    shm: RankPool, blocking: bool
) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        first = DataParallel(net, comm, optimizer, blocking)
        take_step(comm, first, optimizer)
        with pytest.raises(ValueError, match="optimizer belongs to another module's DataParallel"):
            DataParallel(nn.Sequential(net), comm, optimizer, blocking)
        with DataParallel(net, comm, optimizer, blocking) as second:
            after = values(net)  # the step that the first one had to make is made
            take_step(comm, second, optimizer)
            first.close()
            take_step(comm, second, optimizer)
        assert distance(values(net), after) > 0
        alone = make(Plain)
        with DataParallel(alone, comm, descend(alone.parameters()), blocking) as third:
            [take_step(comm, third, third._optimizers[0]) for _ in range(3)]
        assert distance(values(net), values(alone)) == 0
        comm.barrier()

    shm.run(task, size=2)


@MODES
def test_wrapping_a_module_again_closes_what_has_another_optimizer(
    shm: RankPool, blocking: bool
) -> None:
    """As a notebook's cell that runs twice; collecting garbage on one rank changes nothing."""

    def task(comm: Any) -> None:
        net, alone = make(Plain), make(Plain)
        models = []
        for _ in range(2):
            optimizer = descend(net.parameters())
            models.append(DataParallel(net, comm, optimizer, blocking))
            if comm.rank == 1:
                gc.collect()
            [take_step(comm, models[-1], optimizer) for _ in range(3)]
        assert [model._closed for model in models] == [True, False]
        models[1].close()
        with DataParallel(alone, comm, descend(alone.parameters()), blocking) as model:
            [take_step(comm, model, model._optimizers[0]) for _ in range(6)]
        assert distance(values(net), values(alone)) == 0

        def fail() -> None:
            raise CommunicatorError("gone")

        with DataParallel(net, comm, descend(net.parameters()), blocking) as model:
            model.catch_up = fail
            DataParallel(net, comm, descend(net.parameters()), blocking).close()
        comm.barrier()

    shm.run(task, size=2)


@MODES
def test_lives_as_long_as_it_is_referred_to(shm: RankPool, blocking: bool) -> None:
    """As collectors of garbage do not run on all ranks alike."""

    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        gc.disable()
        try:
            model = DataParallel(net, comm, optimizer, blocking)
            take_step(comm, model, optimizer)
            known = weakref.ref(model)
            del model
            assert known() is None
        finally:
            gc.enable()
        assert not optimizer.attached
        assert not optimizer.update_next
        optimizer.catch_up()
        with pytest.raises(RuntimeError, match="step\\(\\) needs an open DataParallel"):
            optimizer.step()
        with DataParallel(net, comm, optimizer, blocking) as model:
            take_step(comm, model, optimizer)
        assert_replicas_equal(comm, net)

    shm.run(task, size=2)


def test_a_communicator_made_of_another_group_is_closed(shm: RankPool) -> None:
    def task(comm: Any, blocking: bool) -> None:
        net, wrapped = make(Plain), comm.split(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "as_communicator", lambda group: wrapped)
            with DataParallel(net, "a group", descend(net.parameters()), blocking):
                wrapped.barrier()
        with pytest.raises(CommunicatorError, match="closed"):
            wrapped.barrier()
        comm.barrier()

    for blocking in (True, False):
        shm.run(task, blocking, size=2)


def test_copies_have_no_owner(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        with warnings.catch_warnings(), DataParallel(net, comm, optimizer) as model:
            warnings.simplefilter("error")
            take_step(comm, model, optimizer)
            with pytest.raises(TypeError, match=r"cannot be copied or pickled: give its \.module"):
                copy.deepcopy(model)
            file = io.BytesIO()
            cloudpickle.dump(net, file)  # the class travelled by value
            file.seek(0)
            for copied in (copy.deepcopy(net), cloudpickle.load(file)):
                loss_of(copied, batch(0)).backward()
                assert optimizer.update_next
                assert distance(values(copied), values(net)) == 0

    shm.run(task, size=2)


def wrapped_twice(comm: Any) -> None:
    net, other = make(Plain), make(Plain)
    with DataParallel(net, comm, descend(net.parameters())) as model:
        with pytest.raises(ValueError, match=r"module must not be .* is one, a DataParallel"):
            DataParallel(model, comm, descend(other.parameters()))
        with pytest.raises(ValueError, match=r"module must not .* has one at '0', a DataParallel"):
            DataParallel(nn.Sequential(model), comm, descend(other.parameters()))
        with DASO(torch.optim.SGD(other.parameters(), 0.1), 4, comm) as daso:
            with pytest.raises(ValueError, match=r"module must not .* is one, a DataParallel"):
                DataParallelMultiGPU(model, daso)
            twice = DataParallelMultiGPU(other, daso)
            with pytest.raises(ValueError, match=r"module must .* is one, a DataParallelMultiGPU"):
                DataParallel(twice, comm, descend(make(Plain).parameters()))
    comm.barrier()


def test_what_is_wrapped_already(shm: RankPool) -> None:
    shm.run(wrapped_twice, size=2)


def of_another_model(comm: Any) -> None:
    net, other = make(Plain), descend(make(Plain).parameters())
    with pytest.raises(ValueError, match="optimizer must hold parameters of module, got those of"):
        DataParallel(net, comm, other)
    with DataParallel(net, comm, [descend(net.parameters()), other]):  # a loss that learns, too
        comm.barrier()


def test_an_optimizer_of_another_model(shm: RankPool) -> None:
    shm.run(of_another_model, size=2)


# --- arguments ----------------------------------------------------------------------------------


def wrong_types(comm: Any) -> None:
    net = make(Plain)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = DataParallelOptimizer(sgd)
    model, opt = DataParallel, DataParallelOptimizer
    for make_it, args, error in (
        (opt, (net,), "torch_optimizer must be a torch.optim.Optimizer, got Plain"),
        (opt, (optimizer,), "torch_optimizer must be a torch.optim.Optimizer, got DataParallelOpt"),
        (opt, (sgd, 1), "blocking must be a bool, got 1"),
        (model, (len, comm, optimizer), "module must be a torch.nn.Module, got <built-in"),
        (model, (net, "shm", optimizer), "expected a communicator"),
        (model, (net, comm, sgd), "optimizer must be a DataParallelOptimizer or several, got SGD"),
        (model, (net, comm, [optimizer, sgd]), "DataParallelOptimizers only, got SGD"),
        (model, (net, comm, optimizer, "no"), "blocking must be a bool, got 'no'"),
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


def test_names_of_heat(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        for blocking in (True, False):
            with DataParallel(net, comm, optimizer, blocking_parameter_updates=blocking) as model:
                assert model.blocking_parameter_updates == model.blocking == blocking
                take_step(comm, model, optimizer)
        with pytest.warns(UserWarning, match="optimizer holds the same .* twice") as caught:
            model = DataParallel(net, comm, [optimizer, optimizer], False)
        assert caught[0].filename == __file__
        with model:
            assert model.blocking_parameter_updates
            take_step(comm, model, optimizer)
        daso = DASO(torch.optim.SGD(net.parameters(), lr=0.1), 5, comm)
        with daso, pytest.raises(TypeError, match=r"got DASO, .* DataParallelMultiGPU\(module"):
            DataParallel(net, comm, daso)
        with pytest.raises(TypeError, match="blocking must be a bool, got 'no'"):
            DataParallel(net, comm, optimizer, blocking_parameter_updates="no")

    shm.run(task, size=2)


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
