"""DASO's rules one by one: what is kept, left alone, agreed on, and resumed."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from tagi_ddp.communicators.levels import Levels
from tagi_ddp.optim.daso import DASO, DataParallelMultiGPU
from tagi_ddp.optim.daso.nodes import Nodes
from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer

CYCLING = {"warmup_epochs": 0, "cooldown_epochs": 0, "downcast_type": torch.float}


class Net(nn.Module):
    """Layers, statistics, a mask with infinities, and parameters in special places."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 1)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.root = nn.Parameter(torch.randn(6))
        self.register_buffer("mask", torch.tensor([0.1, -torch.inf, torch.inf]))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))) * self.root)


def loss_of(module: nn.Module, *seed: int, dtype: torch.dtype = torch.float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(seed))
    x = torch.randn(8, 4, generator=generator, dtype=dtype)
    return (module(x).sum(1) - x.sum(1)).square().mean()


def held(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def one_node(comm: Any) -> None:
    net, other = Net(comm.rank), Net(comm.rank)
    plain = DataParallelOptimizer(torch.optim.Adam(other.parameters(), 0.01), blocking=True)
    parallel = DataParallel(other, comm, plain, blocking=True)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    daso = DASO(optimizer, 3, comm, 1, 1, node_size=comm.size, sending_chunk_size=10)
    module = DataParallelMultiGPU(net, daso)
    daso.last_batch = 4
    for epoch in range(3):
        for batch in range(4):
            for each, stepped in ((module, daso), (parallel, plain)):
                stepped.zero_grad()
                loss_of(each, epoch, batch, comm.rank).backward()
                stepped.step()
            assert_same(held(net), held(other))
        daso.epoch_loss_logic(1.0)
    daso.close()
    parallel.close()


def test_one_node_is_data_parallelism(shm: RankPool) -> None:
    shm.run(one_node, size=3)


def small_steps(comm: Any) -> list[float]:
    found = []
    for warmup, cast in (
        (1, torch.bfloat16),
        (1, torch.half),
        (0, torch.bfloat16),
        (0, torch.float),
    ):
        x = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([x], 1e-3)
        daso = DASO(optimizer, 1, comm, warmup, 0, downcast_type=cast, node_size=1)
        daso.last_batch = 100
        for _ in range(100):
            x.grad = torch.full((), -1.0)
            daso.step()
        daso.close()
        found.append(x.item())
    return found


def test_small_updates_arrive(shm: RankPool) -> None:
    for blocking, other, cycling, exact in shm.run(small_steps, size=2):
        assert blocking == pytest.approx(1.1, rel=1e-5)
        assert other == pytest.approx(1.1, rel=1e-5)
        # Merging a copy sent before takes steps back, by the formula; the cast must not add to it.
        assert cycling == pytest.approx(exact, rel=1e-5)
        assert exact > 1.08


class Training:
    """A net, DASO on it, and how they go on from batch to batch."""

    def __init__(self, comm: Any, epochs: int, batches: int, **arguments: Any) -> None:
        self.rank, self.epochs, self.batches = comm.rank, epochs, batches
        self.net = Net(comm.rank)
        optimizer = torch.optim.Adam(self.net.parameters(), 0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        self.daso = DASO(optimizer, epochs, comm, scheduler=scheduler, **arguments)
        self.module = DataParallelMultiGPU(self.net, self.daso)
        self.daso.last_batch = batches

    def run(self, start: int, stop: int) -> None:
        for number in range(start, stop):
            self.daso.zero_grad()
            loss_of(self.module, number, self.rank).backward()
            self.daso.step()
            if (number + 1) % self.batches == 0:
                self.daso.epoch_loss_logic(1.0)

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.daso.state_dict()), file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        net, daso = torch.load(file, weights_only=True)
        self.net.load_state_dict(net)
        self.daso.load_state_dict(daso)


def rewound(file: io.BytesIO) -> io.BytesIO:
    file.seek(0)
    return file


def resume(comm: Any, stops: list[int]) -> list[bool]:
    options = {"warmup_epochs": 1, "cooldown_epochs": 0, "node_size": 2, "local_skip_factor": 1}
    whole = Training(comm, 3, 12, **options)
    files, busy = [], []
    for start, stop in zip([0, *stops], [*stops, 36], strict=True):
        whole.run(start, stop)
        files.append(whole.save())
        busy.append(whole.daso._nodes.busy)
    for stop, file in zip(stops, files, strict=False):
        again = Training(comm, 3, 12, **options)
        again.run(0, 1)  # what it has done is forgotten
        again.load(file)
        saved = torch.load(rewound(file))[1]
        torch.testing.assert_close(again.daso.state_dict(), saved, rtol=0, atol=0)
        again.run(stop, 36)
        assert_same(held(whole.net), held(again.net))
        assert again.daso.scheduler.get_last_lr() == whole.daso.scheduler.get_last_lr()
        again.daso.close()
    assert whole.daso.scheduler.last_epoch == 36
    whole.daso.close()
    return busy[:-1]


def test_resume(shm: RankPool) -> None:
    stops = [5, 14, 21, 24]
    for rank, busy in enumerate(shm.run(resume, stops)):
        # Group 0 sends after batches 0 of an epoch, group 1 after batches 8; merged 2 later.
        first, second = [False, True, False, False], [False, False, True, False]
        assert busy == [first, second][rank % 2]


def local_work(comm: Any) -> list[float]:
    x = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([x], 1.0)
    options = {"node_size": 2, "local_skip_factor": 1, **CYCLING}
    daso = DASO(optimizer, 1, comm, **options)
    daso.last_batch = 9
    found = []
    for batch in range(9):
        daso.zero_grad()
        x.sum().backward()
        if comm.rank % 2 == 0 or not 3 <= batch < 8:  # those that step alone are after 2
            x.grad.zero_()
        daso.step()
        found.append(x.item())
    daso.close()
    return found


def test_work_of_other_ranks_is_kept(shm: RankPool) -> None:
    for rank, found in enumerate(shm.run(local_work)):
        assert found[:8] == ([0] * 8 if rank % 2 == 0 else [0, 0, 0, -1, -2, -3, -4, -5])
        assert found[8] == -2.5


def steps(comm: Any) -> list[float]:
    """Return what this rank holds after each batch, whose gradients are the node's ranks'."""
    x = nn.Parameter(torch.zeros(()))
    daso = DASO(torch.optim.SGD([x], 1.0), 1, comm, node_size=2, **CYCLING)
    daso.last_batch = 20
    found = []
    for _ in range(20):
        x.grad = torch.tensor(float(comm.rank % 2))
        daso.step()
        found.append(x.item())
    daso.close()
    return found


def test_ranks_of_a_node_step_together_while_a_copy_is_in_flight(shm: RankPool) -> None:
    first, second, *_ = np.array(shm.run(steps))
    apart = np.flatnonzero(first != second)
    assert apart.tolist() == [3, 5, 7, 11, 13, 15]  # neither 1 nor 9 nor 17


def missing(comm: Any) -> tuple[list[float], bool]:
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(3)]
    daso = DASO(torch.optim.SGD(parameters, 1.0), 1, comm, node_size=2)
    daso.last_batch = 1
    if comm.rank == 1:
        parameters[0].grad = torch.ones(())
    if comm.rank == 2:
        parameters[1].grad = torch.ones(())
    daso.step()
    daso.close()
    return [parameter.item() for parameter in parameters], parameters[2].grad is None


def test_a_missing_gradient_counts_as_zero(shm: RankPool) -> None:
    for found, untouched in shm.run(missing):
        assert found == [-0.25, -0.25, 0.0]
        assert untouched


def special(comm: Any, dtype: torch.dtype, chunk: int) -> list[dict[str, np.ndarray]]:
    net = Net(comm.rank, dtype)
    extra = nn.Parameter(torch.full((2,), float(comm.rank), dtype=torch.float64))
    known = [*net.first.parameters(), net.root]
    groups = [{"params": known[:1]}, {"params": known[1:], "lr": 0.1}, {"params": [extra]}]
    optimizer = torch.optim.SGD(groups, 0.05)
    options = {"node_size": 2, "warmup_epochs": 0, "cooldown_epochs": 1}
    daso = DASO(optimizer, 2, comm, sending_chunk_size=chunk, **options)
    module = DataParallelMultiGPU(net, daso)
    daso.last_batch = 10
    found = [held(net)]
    with torch.no_grad():
        net.frozen += comm.rank
    for epoch in range(2):
        for batch in range(10):
            daso.zero_grad()
            (loss_of(module, epoch, batch, comm.rank, dtype=dtype) + extra.sum()).backward()
            with torch.no_grad():  # as a second optimizer may
                net.second.bias += 0.01 * comm.rank
                net.norm.num_batches_tracked += comm.rank  # no rank but 0 has the right number
            daso.step()
            if batch == 9 or epoch == 1:
                found.append({**held(net), "extra": extra.detach().numpy().copy()})
        daso.epoch_loss_logic(1.0)
    daso.close()
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
def test_what_is_synchronized(shm: RankPool, dtype: torch.dtype) -> None:
    runs = [shm.run(special, dtype, chunk) for chunk in (1_000_000, 5)]
    for ranks in runs:
        start = held(Net(0, dtype))
        for rank, (begin, *states) in enumerate(ranks):
            assert_same(begin, start)
            for state in states:
                np.testing.assert_array_equal(state.pop("frozen"), start["frozen"] + rank)
                np.testing.assert_array_equal(state["mask"], start["mask"])
        for _, *states in ranks[1:]:
            for state, first in zip(states, ranks[0][1:], strict=True):
                assert_same(state, first)  # bit for bit, after every blocking synchronization
        last = ranks[0][-1]
        assert last["norm.num_batches_tracked"] == 20
        biases = [state["second.bias"].item() for state in ranks[0][2:]]
        np.testing.assert_allclose(np.diff(biases), 0.015, atol=2e-4)  # no rank's change is lost
        assert (last["norm.running_mean"] != start["norm.running_mean"]).all()
    for states, others in zip(*runs, strict=True):  # whatever the size of chunks
        for state, other in zip(states[1:], others[1:], strict=True):
            assert_same(state, other)


def step_by_small_gradients(comm: Any) -> float:
    x = nn.Parameter(torch.ones((), dtype=torch.float64))
    daso = DASO(torch.optim.SGD([x], 1.0), 1, comm, node_size=1)
    daso.last_batch = 1
    x.grad = torch.full((), 1e-12 * comm.rank, dtype=torch.float64)
    daso.step()
    daso.close()
    return x.item()


def test_float64_is_not_rounded(shm: RankPool) -> None:
    assert shm.run(step_by_small_gradients, size=3) == [pytest.approx(1 - 1e-12, abs=1e-15)] * 3


def conserved(comm: Any) -> list[np.ndarray]:
    """Return, after each merge, the parameters and all that casts have dropped, elementwise."""
    x = torch.ones(40)
    levels = Levels(comm, 1)
    nodes = Nodes(levels, [x], [], torch.bfloat16, 1000, 2.0)
    generator = torch.Generator().manual_seed(comm.rank)
    found = []
    for waited in (1, 3, 2, 1, 4):
        for _ in range(2):
            x += torch.randn(40, generator=generator)
            nodes.send(0)
            x += torch.randn(40, generator=generator)
            nodes.merge(waited)
        residual = nodes._vectors[0].residual
        share = np.zeros(40)
        share[20 * comm.rank : 20 * comm.rank + 20] = residual.share.double().numpy() * comm.size
        found.append(x.double().numpy() + residual.own.double().numpy() + share)
    levels.close()
    return found


def test_merging_loses_nothing(shm: RankPool) -> None:
    ranks = 2
    found = np.mean(shm.run(conserved, size=ranks), axis=0)
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    x = np.ones(40)  # the mean over nodes; merging is linear
    for mean, waited in zip(found, (1, 3, 2, 1, 4), strict=True):
        for _ in range(2):
            sent = x + np.mean([torch.randn(40, generator=g).numpy() for g in generators], axis=0)
            x = sent + np.mean([torch.randn(40, generator=g).numpy() for g in generators], axis=0)
            x = (2 * waited * x + ranks * sent) / (2 * waited + ranks)
        np.testing.assert_allclose(mean, x, atol=1e-5)


def numbers(comm: Any) -> int:
    module = nn.BatchNorm1d(2)
    daso = DASO(torch.optim.SGD(module.parameters(), 0.1), 1, comm, node_size=2)
    daso.set_model(module)
    daso.last_batch = 1
    module.num_batches_tracked += 3 + comm.rank
    daso.step()
    daso.close()
    return int(module.num_batches_tracked)


def test_integers_of_a_node(shm: RankPool) -> None:
    assert shm.run(numbers, size=2) == [3, 3]
