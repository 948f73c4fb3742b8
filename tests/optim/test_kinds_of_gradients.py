"""Complex parameters and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import Tensor, nn

from optim.torch_cases import assert_replicas_equal, descend, distance, make, values
from tagi_ddp import PeerLost
from tagi_ddp.optim import DASO, DataParallelMultiGPU
from tagi_ddp.optim.data_parallel import DataParallel, DataParallelOptimizer

MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])


class Spectral(nn.Module):
    """Complex weights between real ones, some used by their conjugates; a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
        self.mirrored = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.register_buffer("phases", torch.randn(3, dtype=torch.cdouble))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.cdouble))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.first(x)) * self.weight * self.mirrored.conj() * self.phases
        self.seen += found.detach().mean(0)
        return self.last(torch.fft.irfft(found, n=4))


@MODES
@pytest.mark.parametrize("size", [2, 1])
def test_complex_parameters(shm: RankPool, size: int, blocking: bool) -> None:
    """Equal one process, whose starting weights all have; complex buffers are averaged."""

    def task(comm: Any) -> None:
        one, net = make(Spectral), make(Spectral, seed=comm.rank)
        serial = torch.optim.SGD(one.parameters(), 0.05, momentum=0.9)
        optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), 0.05, momentum=0.9))
        with DataParallel(net, comm, optimizer, blocking) as model:
            for step in range(4):
                torch.manual_seed(step)
                x = torch.randn(8, 4, dtype=torch.float64)
                for network, optimize, share in (
                    (one, serial, x),
                    (model, optimizer, x[comm.rank :: comm.size]),
                ):
                    optimize.zero_grad()
                    (network(share) - share.sum(1, keepdim=True)).square().mean().backward()
                    optimize.step()
        as_real = [[torch.view_as_real(v) if v.is_complex() else v for v in values(m)]
                   for m in (one, net)]  # fmt: skip
        assert distance(*as_real) < 1e-12
        assert_replicas_equal(comm, net)

    shm.run(task, size=size)


# --- sparse -------------------------------------------------------------------------------------


class Words(nn.Module):
    """Sparse gradients of two embeddings, one of which only some ranks use."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(4, 3, mode="sum", sparse=True, dtype=dtype)
        self.rare = nn.Embedding(5, 3, sparse=True, dtype=dtype)
        self.last = nn.Linear(3, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        found = self.words(x) + self.bags(x[:, None] % 4)
        if (x > 7).any():
            found = found + self.rare(x % 5) * (x > 7)[:, None]
        return self.last(found)


def _sgd(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), 0.5)]


def _sparse_adam(net: Any) -> list[torch.optim.Optimizer]:
    sparse = [net.words.weight, net.bags.weight, net.rare.weight]
    return [torch.optim.SparseAdam(sparse, 0.1), torch.optim.Adam(net.last.parameters(), 0.1)]


@pytest.mark.parametrize("optimize", [_sgd, _sparse_adam])
@pytest.mark.parametrize("size", [3, 2, 1])
def test_sparse_gradients(shm: RankPool, size: int, optimize: Callable[[Any], Any]) -> None:
    """Blocking: the same as one process on the union, and sparse where all ranks' are."""

    def task(comm: Any) -> None:
        one, net = make(Words), make(Words, seed=comm.rank)
        serial = optimize(one)
        optimizers = [DataParallelOptimizer(each) for each in optimize(net)]
        with DataParallel(net, comm, optimizers, blocking=True) as model:
            for step in range(5):
                x = torch.tensor([step, 1, 2, 8, 1, 2, 4, 1, 0, 6, 5, 5])
                shares = x[comm.rank :: comm.size]
                for network, each, share in ((one, serial, x), (model, optimizers, shares)):
                    for optimizer in each:
                        optimizer.zero_grad()
                    network(share).square().mean().backward()
                    if each is optimizers and step % 2:
                        for optimizer in optimizers:
                            optimizer.synchronize()
                        assert net.rare.weight.grad.is_sparse
                    for optimizer in each:
                        optimizer.step()
                assert distance(values(net), values(one)) < 1e-12
        assert_replicas_equal(comm, net)

    shm.run(task, size=size)


def test_gradients_that_are_sparse_on_some_ranks_only(shm: RankPool) -> None:
    """Dense ones of other ranks make the mean dense; other sparse dimensions are converted."""

    def task(comm: Any) -> None:
        weight, other = (nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(2))
        optimizer = descend([weight, other])
        with DataParallel(nn.ParameterList([weight, other]), comm, optimizer, True):
            part = torch.zeros(3, 2, dtype=torch.float64)
            part[comm.rank, 0] = 6.0
            weight.grad = [part.to_sparse(1), part, None][comm.rank]
            other.grad = [part.to_sparse(1), part.to_sparse(2), None][comm.rank]
            optimizer.synchronize()
            assert weight.grad.layout == torch.strided
            assert weight.grad.tolist() == [[2, 0], [2, 0], [0, 0]]
            assert other.grad.is_sparse
            assert torch.equal(other.grad.to_dense(), weight.grad)

    shm.run(task, size=3)


def test_sparse_gradients_are_refused_when_the_module_is_wrapped(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        net = nn.Sequential(nn.Linear(2, 2), make(Words))
        with pytest.raises((TypeError, ValueError), match=r"sparse gradients of 1\.words\.weight"):
            DataParallel(net, comm, descend(net.parameters()))
        daso = DASO(torch.optim.SGD(net.parameters(), 0.1), 1, comm, 0, 0)
        with pytest.raises(TypeError, match=r"1\.words\.weight: give sparse=False"):
            DataParallelMultiGPU(net, daso)

    shm.run(task, size=2, fresh=True)


def test_sparse_gradients_of_functions(shm: RankPool) -> None:
    """Of which the module says nothing: without blocking they end all ranks."""

    def task(comm: Any) -> None:
        weight = nn.Parameter(torch.zeros(4, 2))
        optimizer = descend([weight])

        def run() -> None:
            with DataParallel(nn.ParameterList([weight]), comm, optimizer):
                words = nn.functional.embedding(torch.tensor([1]), weight, sparse=True)
                words.sum().backward()
                optimizer.step()

        with pytest.raises((TypeError, PeerLost), match=r"gradient of the shape \(4, 2\)"):
            run()

    shm.run(task, size=2, fresh=True)
