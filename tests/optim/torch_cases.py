"""A module, batches and comparisons for tests of training on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tagi_ddp.optim.data_parallel import DataParallelOptimizer, buckets

SAMPLES = 12  # of all ranks, a step


class Plain(nn.Module):
    """Layers of different sizes, in several buckets."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=dtype)
        self.second = nn.Linear(5, 4, dtype=dtype)
        self.last = nn.Linear(4, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@contextlib.contextmanager
def small_buckets() -> Iterator[list[int]]:
    """Make buckets of a few elements; return the sizes of reductions of gradients, as they come."""
    kept, start = buckets._ELEMENTS, buckets.start_reduction
    sizes: list[int] = []

    def recording(tensors: Any, communicator: Any, **options: Any) -> Any:
        if communicator.size > 1:
            sizes.append(sum(tensor.numel() for tensor in tensors))
        return start(tensors, communicator, **options)

    buckets._ELEMENTS, buckets.start_reduction = 16, recording
    try:
        yield sizes
    finally:
        buckets._ELEMENTS, buckets.start_reduction = kept, start


def make(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def batch(step: int) -> Tensor:
    return torch.randn(
        SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )


def loss_of(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the loss, a mean over samples."""
    return (call(x) - x.sum(1, keepdim=True).sin()).square().mean()


def values(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


def assert_replicas_equal(comm: Any, module: nn.Module) -> None:
    for value in values(module):
        for root in range(comm.size):
            other = value.clone()
            comm.broadcast(other.view(-1).view(torch.uint8), root)
            assert torch.equal(value, other)


def descend(params: Any, lr: float = 0.1) -> DataParallelOptimizer:
    return DataParallelOptimizer(torch.optim.SGD(params, lr=lr))


def take_step(comm: Any, model: nn.Module, optimizer: DataParallelOptimizer, step: int = 0) -> None:
    """Take a step on this rank's share of the batch."""
    optimizer.zero_grad()
    loss_of(model, batch(step)[comm.rank :: comm.size]).backward()
    optimizer.step()
