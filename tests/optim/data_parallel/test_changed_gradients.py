"""Gradients that the caller changes between backward and the step."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
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


def _replace(param: nn.Parameter) -> None:
    param.grad = param.grad.clamp(-0.01, 0.01)


def _write_bytes(param: nn.Parameter) -> None:
    memory = memoryview(param.grad.numpy()).cast("B")
    memory[-1] ^= 1  # of an exponent: a bit that no version counter sees


# Ways to change a gradient; most leave torch's version counter as it is.
CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda p: p.grad.clamp_(-0.01, 0.01),
    "data": lambda p: p.grad.data.mul_(0.1),
    "data =": lambda p: setattr(p.grad, "data", p.grad.data.clamp(-0.01, 0.01)),
    "numpy": lambda p: p.grad.numpy().clip(-0.01, 0.01, out=p.grad.numpy()),
    "detach": lambda p: p.grad.detach().numpy().fill(0.5),
    "replaced": _replace,
    "none": lambda p: setattr(p, "grad", None),
    "zero": lambda p: p.grad.data.zero_(),
    "one bit": _write_bytes,
    "set_": lambda p: p.grad.set_(p.grad.detach() * 2),
}


@pytest.mark.parametrize("size", [2, 1])
def test_whatever_changes_them_counts(shm: RankPool, size: int) -> None:
    """Random changes of some parameters, on some ranks, in some steps: both modes agree."""

    def task(comm: Any, seed: int) -> None:
        ends = []
        for blocking in (True, False):
            draw, net = random.Random(seed * 10 + comm.rank), make(Plain)
            optimizer = descend(net.parameters())
            with (
                small_buckets(),
                DataParallel(net, comm, optimizer, blocking) as model,
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", "gradients were changed", RuntimeWarning)
                for step in range(4):
                    optimizer.zero_grad()
                    loss_of(model, batch(step)[comm.rank :: comm.size]).backward()
                    for param in net.parameters():
                        if draw.random() < 0.3:
                            CHANGES[draw.choice(list(CHANGES))](param)
                    optimizer.step()
                    model.eval()  # catches up, so that the next gradients are of equal parameters
            assert_replicas_equal(comm, net)
            ends.append(values(net))
        assert distance(*ends) == 0

    for seed in range(4):
        shm.run(task, seed, size=size)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_alone(shm: RankPool, change: str) -> None:
    """Of one parameter, of one rank, whose reduction has begun."""

    def task(comm: Any) -> None:
        ends = []
        for blocking in (True, False):
            net = make(Plain)
            optimizer = descend(net.parameters())
            with small_buckets(), DataParallel(net, comm, optimizer, blocking) as model:
                loss_of(model, batch(0)[comm.rank :: comm.size]).backward()
                if comm.rank == 1:
                    CHANGES[change](net.last.weight)
                optimizer.step()
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "gradients were changed", RuntimeWarning)
                    model.eval()
            ends.append(values(net))
        assert distance(*ends) == 0

    shm.run(task, size=2)


@pytest.mark.parametrize("size", [3, 2, 1])
@pytest.mark.parametrize("calls", [1, 2])
def test_synchronize_lets_clipping_see_the_whole_batch(
    shm: RankPool, size: int, calls: int
) -> None:
    """With several backward calls, and however often it is called."""

    def task(comm: Any) -> None:
        one, net = make(Plain), make(Plain)
        serial = torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9)
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), 0.5, momentum=0.9))
        with DataParallel(net, comm, optimizer, blocking=True) as model:
            for step in range(4):
                optimizer.zero_grad()
                for _ in range(calls):
                    loss_of(model, batch(step)[comm.rank :: comm.size]).backward()
                    optimizer.synchronize()
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                serial.zero_grad()
                for _ in range(calls):
                    loss_of(one, batch(step)).backward()
                expected = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                serial.step()
                assert abs(norm - expected) < 1e-12
                assert distance(values(net), values(one)) < 1e-12
        assert_replicas_equal(comm, net)

    shm.run(task, size=size)


def test_synchronize_leaves_alone_what_no_rank_has(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        with DataParallel(net, comm, optimizer, blocking=True) as model:
            model(batch(0))
            if comm.rank == 1:
                net.first.weight.sum().backward()
            optimizer.synchronize()
            assert torch.equal(net.first.weight.grad, torch.full_like(net.first.weight, 0.5))
            assert net.last.weight.grad is None

    shm.run(task, size=2)


def test_scaled_gradients_are_clipped(shm: RankPool) -> None:
    """Unscaled, averaged and clipped; and a step with an overflow of one rank is left out."""

    def task(comm: Any) -> None:
        one, net = make(Plain), make(Plain)
        serial = torch.optim.SGD(one.parameters(), 0.5)
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), 0.5))
        scaler = torch.amp.GradScaler("cpu", 1024.0)
        with DataParallel(net, comm, optimizer, blocking=True) as model:
            for step in range(3):
                optimizer.zero_grad()
                loss = loss_of(model, batch(step)[comm.rank :: 2])
                scaler.scale(loss * (torch.inf if comm.rank and step == 1 else 1)).backward()
                scaler.unscale_(optimizer)
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                if step != 1:
                    serial.zero_grad()
                    loss_of(one, batch(step)).backward()
                    nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                    serial.step()
        assert distance(values(net), values(one)) < 1e-12

    shm.run(task, size=2)


def test_synchronize_without_blocking_is_refused(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = descend(net.parameters())
        with pytest.raises(RuntimeError, match=r"synchronize\(\) needs an open DataParallel"):
            optimizer.synchronize()
        with DataParallel(net, comm, optimizer) as model:
            loss_of(model, batch(0)).backward()
            with pytest.raises(RuntimeError, match="blocking=True"):
                optimizer.synchronize()
            optimizer.step()  # the group goes on

    shm.run(task, size=2)
