"""Groups of all kinds, tensors of all formats, and torch.compile."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import distributed as dist

from tagi_ddp.communicators import BackendUnavailable, nccl
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.sharding import (
    gather_tensor,
    reduce_shard_tensor,
    reduce_tensor,
    shard_heads,
    shard_sequence,
    shard_tensor,
    sync_tensor,
)
from tagi_ddp.sharding.groups import communicator

Tensor = torch.Tensor


@pytest.mark.parametrize("comm", [None, "single"])
def test_group_of_one(comm: Any) -> None:
    group = SingleCommunicator() if comm else None
    wrong = (7, "not looked at")
    for function, args in {
        shard_tensor: wrong,
        gather_tensor: wrong,
        sync_tensor: wrong,
        reduce_shard_tensor: wrong,
        reduce_tensor: (),
        shard_heads: wrong[1:],
        shard_sequence: wrong[1:],
    }.items():
        given = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        given.requires_grad_()
        out = function(given, *args, group)
        assert out.is_contiguous(memory_format=torch.channels_last)
        out.backward(torch.full_like(out, 3.0))
        assert (given.grad == 3).all()
        with torch.no_grad():
            given.zero_()
        assert torch.equal(out.flatten(), torch.arange(24.0))


def memories() -> set[str]:
    """Return where memory lies that this process shares with other ranks."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "memfd:tagi" in line}


def sync_over_process_groups(comm: Any, path: str) -> None:
    before = memories()  # those of other tests that this process has run
    dist.init_process_group("gloo", f"file://{path}", rank=comm.rank, world_size=comm.size)
    try:
        shapes = [[1 + r, 2] for r in range(comm.size)]
        whole = torch.arange(2.0 * sum(s[0] for s in shapes)).view(-1, 2)
        own = shard_tensor(whole, 0, shapes, dist.group.WORLD).requires_grad_()
        for _ in range(2):
            out = sync_tensor(own, 0, shapes, dist.group.WORLD)
            assert torch.equal(out, whole)
            out.sum().backward()
        assert (own.grad == 2 * comm.size).all()
        part = dist.new_group([1, 2])
        alone = dist.new_group([comm.rank], use_local_synchronization=True)
        assert torch.equal(gather_tensor(own, 5, [], alone), own)
        if comm.rank == 0:
            with pytest.raises(ValueError, match="not in the group"):
                gather_tensor(own, 0, shapes[1:], part)
        else:
            assert torch.equal(gather_tensor(own, 0, shapes[1:], part), whole[1:])
        dist.barrier()
    finally:
        dist.destroy_process_group()
    del part, alone
    deadline = time.monotonic() + 20
    while (left := memories() - before) and time.monotonic() < deadline:
        gc.collect()  # a thread of the communicator's may hold it until it has ended
        time.sleep(0.05)
    assert not left, "memory is left though its group is gone"


def test_process_groups(shm: RankPool, tmp_path: Path) -> None:
    shm.run(sync_over_process_groups, str(tmp_path / "store"), size=3)


def unavailable(*_: Any) -> None:
    raise BackendUnavailable("no NCCL here")


def on_devices(comm: Any, path: str, works: bool) -> str:
    """Return the backend for a process group's tensors on a device, where NCCL works or not."""
    dist.init_process_group("gloo", f"file://{path}", rank=comm.rank, world_size=comm.size)
    create = nccl.create
    try:
        device = torch.device("cuda", comm.rank)
        if not works:
            nccl.create = unavailable
        with contextlib.nullcontext() if works else pytest.warns(RuntimeWarning, match="the host"):
            found = communicator(dist.group.WORLD, device)
        assert communicator(dist.group.WORLD, device) is found
        assert communicator(dist.group.WORLD, torch.device("cpu")).backend == "gloo"
        sums = torch.ones(4)
        found.all_reduce(sums)
        assert (sums == comm.size).all()
        return found.backend
    finally:
        nccl.create = create
        dist.destroy_process_group()


def test_process_group_on_devices(nccl: RankPool, shm: RankPool, tmp_path: Path) -> None:
    assert nccl.run(on_devices, str(tmp_path / "with"), True, size=2) == ["nccl"] * 2
    assert shm.run(on_devices, str(tmp_path / "without"), False, size=2) == ["gloo"] * 2


def memory_formats_that_differ(comm: Any) -> None:
    """Check functions on tensors whose memory formats differ between ranks: no value moves."""
    shapes = [[2, 3, 4, 5], [2, 1, 4, 5]]
    whole = torch.arange(160.0).view(2, 4, 4, 5)
    for formats in (
        (torch.channels_last, torch.contiguous_format),
        (torch.contiguous_format, torch.channels_last),
    ):
        part = whole.split((3, 1), 1)[comm.rank].clone(memory_format=formats[comm.rank])
        part.requires_grad_()
        out = sync_tensor(part, 1, shapes, comm)
        assert torch.equal(out, whole)
        out.backward(whole.clone(memory_format=formats[1 - comm.rank]))
        assert torch.equal(part.grad, 2 * whole.split((3, 1), 1)[comm.rank])
        given = whole.clone(memory_format=formats[comm.rank]).requires_grad_()
        shard_tensor(given, 1, shapes, comm).backward(part.detach())
        assert torch.equal(given.grad, whole)
    single = whole[:, :1].contiguous()
    assert gather_tensor(single, 0, [[2, 1, 4, 5]] * 2, comm).stride() == single.stride()


def test_memory_formats_that_differ(shm: RankPool) -> None:
    shm.run(memory_formats_that_differ, size=2)


class Model(torch.nn.Module):
    """Works on a part of the rows, with all of them in between."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(4, 4).double() for _ in range(2))
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        shapes = [[2, 4], [1, 4]]
        part = shard_tensor(x, 0, shapes, self.comm)
        part = torch.relu(self.first(part))
        mixed = self.second(sync_tensor(part, 0, shapes, self.comm)).cos()
        return reduce_tensor(mixed, self.comm).sum() * (self.comm.rank + 1)


def compiled(comm: Any) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    answers = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
        model, given = Model(comm), x.clone().requires_grad_()
        out = wrap(model)(given)
        out.backward()
        answers.append([out, given.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*answers)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled(shm: RankPool) -> None:
    shm.run(compiled, size=2, limit=60)


def test_compiled_in_a_piece_without_a_group() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        return sync_tensor(x * 2, 0, [], None) + shard_heads(x, [], None)

    x = torch.ones(2, 3, 4)
    assert torch.equal(function(x), 3 * x)
