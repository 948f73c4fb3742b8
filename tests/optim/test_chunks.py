"""Many tensors in one collective: any chunk size, dtype, shape and stride."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import Tensor

from tagi_ddp.communicators import init
from tagi_ddp.optim.chunks import broadcast_in_place, mean_in_place, start_reduction

LIMITS = (1, 7, 64, 10_000_000)


def draw(rank: int) -> list[Tensor]:
    """Return tensors of all float dtypes, shapes and strides."""
    generator = torch.Generator().manual_seed(rank)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        some(3, 5),
        some(),
        some(4, 3, dtype=torch.float64),
        some(0, 2),
        some(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        some(6, 4).t(),
        some(9, dtype=torch.bfloat16),
        some(5, dtype=torch.float16),
        some(8)[::2],
        torch.nn.Parameter(some(100)),
    ]


def expected(size: int) -> list[Tensor]:
    means = []
    for rows in zip(*(draw(rank) for rank in range(size)), strict=True):
        wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
        total = sum(row.detach().to(wide) for row in rows)
        means.append((total / size).to(rows[0].dtype))
    return means


class Counted:
    """A communicator that keeps the sizes of its reductions."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_reduce(self, buffer: Tensor, *args: Any, **options: Any) -> Any:
        self.counts.append(buffer.numel())
        return self.comm.all_reduce(buffer, *args, **options)


def reduce_in_chunks(comm: Any, limits: tuple[int, ...] = LIMITS) -> None:
    wanted = expected(comm.size)
    for limit in limits:
        for start in (False, True):
            tensors, counted = draw(comm.rank), Counted(comm)
            if start:
                pending = start_reduction(tensors, counted, limit=limit)
                pending.wait()
                pending.wait()
            else:
                mean_in_place(tensors, counted, limit)
            for tensor, own, mean in zip(tensors, draw(comm.rank), wanted, strict=True):
                assert torch.equal(tensor, mean), (limit, start, tensor.dtype, tensor.shape)
                assert tensor.stride() == own.stride()
            total = sum(tensor.numel() for tensor in tensors)
            assert sum(counted.counts) == total
            assert max(counted.counts) <= limit
            assert len(counted.counts) <= total // limit + 4  # one more for each dtype


def test_means(shm: RankPool) -> None:
    for size in (2, 3):
        shm.run(reduce_in_chunks, size=size)


def test_means_over_gloo(gloo: RankPool) -> None:
    gloo.run(reduce_in_chunks, (64,))


def sums(comm: Any) -> None:
    tensors = [torch.full((5,), comm.rank + 1), torch.ones(3)]
    start_reduction(tensors, comm, "sum", limit=2).wait()
    assert tensors[0].tolist() == [3] * 5
    assert tensors[1].tolist() == [2] * 3


def test_sums(shm: RankPool) -> None:
    shm.run(sums, size=2)


class Ordered:
    """A work as devices have it, which the host need not wait for."""

    def __init__(self, work: Any, calls: list[Any]) -> None:
        self.work = work
        self.calls = calls

    def order(self) -> None:
        self.calls.append("order")
        self.work.wait()


def test_on_a_device_the_host_does_not_wait(shm: RankPool) -> None:
    class OnDevice(Counted):
        def all_reduce(self, buffer: Tensor, *args: Any, **options: Any) -> Any:
            return Ordered(super().all_reduce(buffer, *args, **options), calls)

    calls: list[Any] = []

    def task(comm: Any) -> list[Any]:
        tensor = torch.full((3,), comm.rank + 1.0)
        start_reduction([tensor], OnDevice(comm), limit=2).wait()
        assert tensor.tolist() == [1.5] * 3
        return calls

    assert shm.run(task, size=2) == [["order", "order"]] * 2


def broadcasts(comm: Any) -> None:
    def make(rank: int) -> list[Tensor]:
        return [
            *draw(rank),
            torch.tensor([rank == 1, True]),
            torch.tensor(1j * rank),
            torch.tensor(rank),
        ]

    for limit in LIMITS:
        tensors = make(comm.rank)
        broadcast_in_place(tensors, comm, 1, limit)
        assert all(torch.equal(a, b) for a, b in zip(tensors, make(1), strict=True)), limit


def test_broadcast(shm: RankPool) -> None:
    shm.run(broadcasts, size=3)


def test_linear_memory_and_time(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        tensors = [torch.full((10_000,), float(comm.rank + number)) for number in range(100)]
        counted = Counted(comm)
        mean_in_place(tensors, counted, 1000)
        assert counted.counts == [1000] * 1000
        for number, tensor in enumerate(tensors):
            assert (tensor == number + 0.5).all()

    shm.run(task, size=2, limit=10.0)


def test_a_world_of_one_returns_at_once() -> None:
    with init("auto", 0, 1) as comm:
        counted = Counted(comm)
        tensor, integers = torch.ones(3), torch.ones(3, dtype=torch.int64)
        mean_in_place([tensor, integers], counted)
        start_reduction([tensor], counted).wait()
        broadcast_in_place([tensor], counted)
        assert counted.counts == []
        assert tensor.tolist() == [1, 1, 1]


def test_refusals(shm: RankPool) -> None:
    def task(comm: Any) -> None:
        with pytest.raises(TypeError, match="dense"):
            mean_in_place([torch.ones(3).to_sparse()], comm)
        with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
            mean_in_place([torch.ones(3)], comm, 0)

    shm.run(task, size=2)
