"""Shapes of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rank_pool import RankPool
from torch import distributed as dist

from tagi_ddp.communicators.buffers import equal_counts
from tagi_ddp.sharding import change_channels_in_shape, get_shape_shards


@given(length=st.integers(0, 50), ranks=st.integers(1, 12))
def test_sizes_are_those_of_tensor_split(length: int, ranks: int) -> None:
    expected = [part.numel() for part in torch.arange(length).tensor_split(ranks)]
    assert equal_counts(length, ranks) == expected


def shards(comm: Any) -> list[list[list[int]]]:
    return [get_shape_shards(torch.empty(5, 2, 7), dim, comm) for dim in (0, 1, -1)]


def test_shapes_over_a_communicator(shm: RankPool) -> None:
    expected = [
        [list(part.shape) for part in torch.empty(5, 2, 7).tensor_split(3, dim)]
        for dim in (0, 1, -1)
    ]
    assert shm.run(shards, size=3) == [expected] * 3


def find_shapes_over_process_groups(comm: Any, path: str) -> tuple[Any, Any]:
    dist.init_process_group("gloo", f"file://{path}", rank=comm.rank, world_size=comm.size)
    try:
        part = dist.new_group([1, 2])
        comm.barrier()  # gloo's ranks fail while they connect if another one has already left
        whole = get_shape_shards(torch.empty(4, 2), 0, dist.group.WORLD)
        if comm.rank:
            return whole, get_shape_shards(torch.empty(4, 2), 0, part)
        with pytest.raises(ValueError, match="not in the group"):
            get_shape_shards(torch.empty(4, 2), 0, part)
        return whole, None
    finally:
        dist.destroy_process_group()


def test_shapes_over_a_process_group(shm: RankPool, tmp_path: Path) -> None:
    answers = shm.run(find_shapes_over_process_groups, str(tmp_path / "store"), size=3)
    whole, part = [[2, 2], [1, 2], [1, 2]], [[2, 2], [2, 2]]
    assert answers == [(whole, None), (whole, part), (whole, part)]


def test_no_group() -> None:
    assert get_shape_shards(torch.empty(5, 3), 1) == [[5, 3]]


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_out_of_range(dim: int) -> None:
    with pytest.raises(IndexError, match=f"dim is {dim}"):
        get_shape_shards(torch.empty(5, 3), dim)


def test_group_of_another_type() -> None:
    with pytest.raises(TypeError, match="str"):
        get_shape_shards(torch.empty(5, 3), 0, "gloo")


def test_channels() -> None:
    given = [torch.Size([4, 3]), [5, 3], (6, 2, 3)]
    assert change_channels_in_shape(given, 8) == [[4, 8], [5, 8], [6, 2, 8]]
    assert given == [torch.Size([4, 3]), [5, 3], (6, 2, 3)]
    assert change_channels_in_shape([4, 3], 8) == [4, 3]


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_channels_of_nothing(nothing: Any) -> None:
    assert change_channels_in_shape(nothing, 8) == []
