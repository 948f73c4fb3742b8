"""The functions of `tagi_ddp.sharding.graph` against what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import RankPool

from sharding.cases import Case, cases, expect, run, total
from tagi_ddp.sharding import (
    gather_tensor,
    reduce_shard_tensor,
    reduce_tensor,
    shard_tensor,
    sync_tensor,
)
from tagi_ddp.sharding.collectives import Transport


def check_graph_case(comm: Any, case: Case, device: str) -> None:
    """Compare every function, forward and backward, on a rank, with the unsharded computation."""
    rank, ranks, dim, shapes = comm.rank, comm.size, case.dim, case.shapes
    whole = case.whole(0).to(device)
    wholes = [case.whole(1 + r).to(device) for r in range(ranks)]
    summed = total(wholes)

    def compare(name: str, function: Any, given: Any, gradient: Any, out: Any, back: Any) -> None:
        for expanded in (False, True):
            if expanded:  # what sum().backward() sends
                ones = torch.ones_like(gradient)
                scale = back(ones, [torch.ones_like(w) for w in wholes])
                found = run(function, case.lay(given), ones.new_ones(()).expand(ones.shape))
                expect(f"{name}, expanded", case, found[1], scale)
            else:
                found = run(function, case.lay(given), case.lay(gradient))
                expect(name, case, found[0], out)
                expect(f"{name}, backward", case, found[1], back(gradient, wholes))

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return case.part(tensor, rank)

    compare(
        "shard_tensor",
        lambda x: shard_tensor(x, dim, shapes, comm),
        whole,
        part(wholes[rank]),
        part(whole),
        lambda g, gs: torch.cat([case.part(w, r) for r, w in enumerate(gs)], dim),
    )

    def filled(gradient: torch.Tensor, _: Any) -> torch.Tensor:
        parts = [torch.zeros_like(case.part(whole, r)) for r in range(ranks)]
        return torch.cat([*parts[:rank], gradient, *parts[rank + 1 :]], dim)

    compare(
        "shard_tensor without a gather",
        lambda x: shard_tensor(x, dim, shapes, comm, gather_in_backward=False),
        whole,
        part(wholes[rank]),
        part(whole),
        filled,
    )
    compare(
        "gather_tensor",
        lambda x: gather_tensor(x, dim, shapes, comm),
        part(whole),
        wholes[rank],
        whole,
        lambda g, gs: part(g),
    )
    compare(
        "sync_tensor",
        lambda x: sync_tensor(x, dim, shapes, comm),
        part(whole),
        wholes[rank],
        whole,
        lambda g, gs: part(total(gs)),
    )
    if case.dtype == torch.bool:  # which has no sum
        return
    compare(
        "reduce_tensor",
        lambda x: reduce_tensor(x, comm),
        wholes[rank],
        whole,
        summed,
        lambda g, gs: g,
    )
    compare(
        "reduce_shard_tensor",
        lambda x: reduce_shard_tensor(x, dim, shapes, comm),
        wholes[rank],
        part(wholes[rank]),
        part(summed),
        lambda g, gs: torch.cat([case.part(w, r) for r, w in enumerate(gs)], dim),
    )


def check_graph(comm: Any, device: str = "cpu") -> int:
    done = 0
    for case in cases(comm.size):
        check_graph_case(comm, case, device)
        done += 1
    return done


@pytest.mark.parametrize("size", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_shm(shm: RankPool, size: int) -> None:
    assert min(shm.run(check_graph, size=size)) > 50


def check_staged(comm: Any) -> int:
    """As if the tensors were on a device, and the communicator's buffers on the host."""
    own, Transport.staged = Transport.staged, lambda transport, tensor: True
    try:
        return check_graph(comm)
    finally:
        Transport.staged = own


@pytest.mark.slow
def test_by_way_of_the_host(shm: RankPool) -> None:
    assert min(shm.run(check_staged, size=2)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_gloo(gloo: RankPool, size: int) -> None:
    assert min(gloo.run(check_graph, size=size, limit=60)) > 50


@pytest.mark.slow
def test_mpi(mpi: RankPool) -> None:
    assert min(mpi.run(check_graph, limit=60)) > 50
