"""Training on all ranks is training on the union of their shares, at once or a step later."""

from __future__ import annotations

import warnings
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
    distance,
    loss_of,
    make,
    small_buckets,
    values,
)
from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, weight_decay=0.1),
}
MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
STEPS = 4


class Odd(Plain):
    """Parameters on the root, used by function, tied, used twice, frozen and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.table = nn.Linear(4, 4, dtype=torch.float64)  # which is never called
        self.mirror = nn.Linear(5, 5, dtype=torch.float64)
        self.image = nn.Linear(5, 5, dtype=torch.float64)
        self.image.weight = self.mirror.weight
        self.frozen = nn.Linear(5, 5, dtype=torch.float64).requires_grad_(False)
        self.unused = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        x = self.image(torch.tanh(self.mirror(self.mirror(x)))) + self.frozen(x)
        x = nn.functional.linear(torch.tanh(self.second(x)), self.table.weight, self.table.bias)
        return self.last(x)


class Mixed(nn.Module):
    """A layer of float32 between two of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.first(x).float())).double())


def serial(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, scheduler: Any = None
) -> list[list[Tensor]]:
    """Return all values before training and after each step on the whole batches."""
    states = [values(net)]
    device = next(net.parameters()).device
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, batch(step).to(device)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        states.append(values(net))
    return states


def train_and_compare(
    comm: Any,
    net: nn.Module,
    torch_optimizer: torch.optim.Optimizer,
    blocking: bool,
    expected: list[list[Tensor]],
    *,
    late: bool = False,
    set_to_none: bool = True,
    scheduler: Any = None,
    tolerance: float = 1e-12,
    samples: Callable[[Tensor, int], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Train, comparing with ``expected`` after each step; return the values in the end.

    ``late``: gradients are reset just before backward. ``samples``: this rank's micro-batches, the
    mean of whose losses counts.
    """
    optimizer = DataParallelOptimizer(torch_optimizer)
    with small_buckets() as sizes, DataParallel(net, comm, optimizer, blocking) as model:
        assert optimizer.blocking_parameter_updates == blocking
        assert distance(values(net), expected[0]) == 0
        for step in range(len(expected) - 1):
            x = batch(step)[comm.rank :: comm.size].to(expected[0][0].device)
            parts = [x] if samples is None else samples(x, step)
            if not late:
                optimizer.zero_grad(set_to_none=set_to_none)
            for number, part in enumerate(parts):
                loss = loss_of(model, part) * (len(part) / len(x))
                assert distance(values(net), expected[step]) <= tolerance
                assert not optimizer.update_next
                if late and number == 0:
                    optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            after = step + 1 if blocking else step
            assert distance(values(net), expected[after]) <= tolerance, (step, late)
            assert optimizer.update_next == (not blocking)
        assert bool(sizes) == (comm.size > 1 and not blocking)
    assert distance(values(net), expected[-1]) <= tolerance
    assert_replicas_equal(comm, net)
    return values(net)


# --- equal to one process -----------------------------------------------------------------------


def all_optimizers(comm: Any, blocking: bool, device: str = "cpu") -> list[Tensor]:
    """Return the values in the end, by every optimizer."""
    found = []
    for name, optimize in OPTIMIZERS.items():
        one = make(Plain).to(device)
        expected = serial(one, optimize(one.parameters()))
        assert distance(expected[0], expected[1]) > 1e-3, name
        ends = []
        for late, set_to_none in ((False, True), (True, True), (True, False)):
            net = make(Plain).to(device)
            ends.append(
                train_and_compare(
                    comm,
                    net,
                    optimize(net.parameters()),
                    blocking,
                    expected,
                    late=late,
                    set_to_none=set_to_none,
                )
            )
        same = 0 if device == "cpu" else 1e-12  # a GPU adds up in any order
        assert all(distance(end, ends[0]) <= same for end in ends), "the loop's order matters"
        found += [value.cpu() for value in ends[0]]
    return found


@pytest.mark.parametrize("size", [4, 3, 2, 1])
@MODES
def test_equals_serial_training_at_each_step(shm: RankPool, size: int, blocking: bool) -> None:
    """Non-blocking: one step later, seen from outside; in both loop orders, bit for bit."""
    shm.run(all_optimizers, blocking, size=size)


@MODES
@pytest.mark.parametrize("kind", [Odd, Mixed])
def test_odd_parameters(shm: RankPool, kind: type[nn.Module], blocking: bool) -> None:
    """On the root, used by function, tied, used twice, frozen, never used; of several dtypes."""

    def task(comm: Any) -> None:
        one, net = make(kind), make(kind)
        expected = serial(one, OPTIMIZERS["Adam"](one.parameters()))
        tolerance = 1e-12 if kind is Odd else 1e-6
        train_and_compare(
            comm, net, OPTIMIZERS["Adam"](net.parameters()), blocking, expected, tolerance=tolerance
        )
        if kind is Odd:
            for end, begin in zip(values(net.unused), values(make(kind).unused), strict=True):
                assert torch.equal(end, begin)

    shm.run(task, size=2)


@MODES
def test_float64_is_not_rounded(shm: RankPool, blocking: bool) -> None:
    def task(comm: Any) -> None:
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        with DataParallel(net, comm, optimizer, blocking) as model:
            start = float(net.weight)
            model(torch.full((1, 1), 1 + 2.0**-40 * comm.rank, dtype=torch.float64)).backward()
            optimizer.step()
        assert float(net.weight) == start - (1 + 2.0**-41)

    shm.run(task, size=2)


@MODES
def test_several_groups_and_a_scheduler(shm: RankPool, blocking: bool) -> None:
    """Settings are those at the time of the step, without a warning."""

    def optimize(net: nn.Module) -> torch.optim.Optimizer:
        lr = torch.tensor(0.3, dtype=torch.float64)  # which the scheduler changes in place
        return torch.optim.SGD(
            [
                {"params": net.first.parameters(), "lr": lr, "momentum": 0.9},
                {"params": [*net.second.parameters(), net.last.bias], "weight_decay": 0.5},
                {"params": [net.last.weight], "lr": 0.0},
            ],
            lr=0.2,
            foreach=False,
        )

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)

    def task(comm: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one, net = make(Plain), make(Plain)
            reference, own = optimize(one), optimize(net)
            expected = serial(one, reference, scheduler=schedule(reference))
            train_and_compare(comm, net, own, blocking, expected, scheduler=schedule(own))
        assert torch.equal(net.last.weight, make(Plain).last.weight)
        assert [len(group["params"]) for group in own.param_groups] == [2, 3, 1]

    shm.run(task, size=2)


@MODES
def test_a_layer_that_thaws(shm: RankPool, blocking: bool) -> None:
    def task(comm: Any) -> None:
        def thawing(net: nn.Module) -> Any:
            net.second.requires_grad_(False)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

            class Thaw:
                steps = 0

                def step(self) -> None:
                    self.steps += 1
                    net.second.requires_grad_(self.steps >= 2)

            return optimizer, Thaw()

        one, net = make(Plain), make(Plain)
        optimizer, scheduler = thawing(one)
        expected = serial(one, optimizer, scheduler=scheduler)
        optimizer, scheduler = thawing(net)
        train_and_compare(comm, net, optimizer, blocking, expected, scheduler=scheduler)
        assert not torch.equal(net.second.weight, make(Plain).second.weight)

    shm.run(task, size=2)


# --- gradients ----------------------------------------------------------------------------------


@MODES
def test_several_backward_calls_before_a_step(shm: RankPool, blocking: bool) -> None:
    """Their number may differ from step to step and from rank to rank."""

    def task(comm: Any) -> None:
        def samples(x: Tensor, step: int) -> list[Tensor]:
            return list(x.split([6, 2, 6, 1][step] if comm.rank else 6))

        one = make(Plain)
        expected = serial(one, OPTIMIZERS["momentum"](one.parameters()))
        for late in (False, True):
            net = make(Plain)
            own = OPTIMIZERS["momentum"](net.parameters())
            train_and_compare(comm, net, own, blocking, expected, late=late, samples=samples)

    shm.run(task, size=2)


def test_reductions_start_during_backward(shm: RankPool) -> None:
    """Until gradients are changed before a step, as they would be reduced twice."""

    def task(comm: Any) -> None:
        net = make(Plain)
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        whole = sum(p.numel() for p in net.parameters())
        with small_buckets() as sizes, DataParallel(net, comm, optimizer) as model:

            def counts(calls: int) -> tuple[int, int, int]:
                """Return how many elements are reduced in backward, the step and forward."""
                optimizer.zero_grad()
                before = sum(sizes)
                loss = loss_of(model, batch(0))
                forward = sum(sizes)
                for _ in range(calls):
                    loss.backward(retain_graph=True)
                backward = sum(sizes)
                optimizer.step()
                return forward - before, backward - forward, sum(sizes) - backward

            assert counts(1) == (0, whole, 0)
            assert counts(1) == (0, whole, 0)
            assert sizes[0] == net.second.bias.numel() + sum(
                p.numel() for p in net.last.parameters()
            )
            assert max(sizes) <= 20
            assert counts(2) == (0, whole, 0)
            with pytest.warns(RuntimeWarning, match="from now on step"):
                found = counts(2)
            assert found == (whole, 0, whole), "changed gradients are reduced again, once"
            assert counts(1) == (0, 0, whole)
            assert counts(1) == (0, 0, whole)

    shm.run(task, size=2)


@MODES
def test_missing_gradients(shm: RankPool, blocking: bool) -> None:
    """One that only some ranks have counts as zero on the others; one that none has, as none."""

    def task(comm: Any) -> None:
        net = make(Plain).requires_grad_(True)
        start = values(net)
        optimizer = DataParallelOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=0.5)
        )
        with small_buckets(), DataParallel(net, comm, optimizer, blocking) as model:
            for _ in range(3):  # backward may reach nothing at all
                optimizer.zero_grad()
                model(batch(0))
                if comm.rank == 1:
                    net.first.weight.sum().backward()
                optimizer.step()
        change = [a - b for a, b in zip(values(net), start, strict=True)]
        assert [bool(c.any()) for c in change] == [True] + [False] * 5
        weight = start[0]
        for _ in range(3):
            weight = weight - (1 / 3 + 0.5 * weight)
        assert torch.allclose(net.first.weight, weight, atol=1e-14)

    shm.run(task, size=3)


@MODES
def test_a_step_left_out(shm: RankPool, blocking: bool) -> None:
    """Gradients that were thrown away do not count, though their reduction had begun."""

    def task(comm: Any) -> None:
        one, net = make(Plain), make(Plain)
        expected = serial(one, OPTIMIZERS["Adam"](one.parameters()))
        optimizer = DataParallelOptimizer(OPTIMIZERS["Adam"](net.parameters()))
        with small_buckets(), DataParallel(net, comm, optimizer, blocking) as model:
            for step in range(STEPS):
                x = batch(step)[comm.rank :: 2]
                if step % 2:
                    loss_of(model, x + 1).backward()
                    optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert distance(values(net), expected[-1]) < 1e-12

    shm.run(task, size=2)


@MODES
def test_steps_without_a_forward_between(shm: RankPool, blocking: bool) -> None:
    def task(comm: Any) -> None:
        net = nn.Linear(1, 1, bias=False)
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        with DataParallel(net, comm, optimizer, blocking) as model:
            start = net.weight.item()
            loss = model(torch.tensor([[2.0 * comm.rank]]))
            for calls in (1, 2, 2, 1):
                optimizer.zero_grad()
                for _ in range(calls):
                    loss.backward(retain_graph=True)
                optimizer.step()
        assert net.weight.item() == pytest.approx(start - 6)

    shm.run(task, size=2)
