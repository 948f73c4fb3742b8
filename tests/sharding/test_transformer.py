"""Heads and sequences exchanged between ranks, against what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.rank_pool import RankPool

from sharding.cases import (
    ALL_DTYPES,
    EMPTY,
    EVEN,
    LAYOUTS,
    UNEVEN,
    WITH_EMPTY,
    Tensor,
    drawn,
    expect,
    run,
)
from tagi_ddp.communicators import CommunicatorError
from tagi_ddp.sharding import shard_heads, shard_sequence


@dataclass(frozen=True)
class Case:
    """Lengths of the sequence's parts, the number of heads, the dimensions before them."""

    lengths: tuple[int, ...]
    heads: int
    leading: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"

    @property
    def shapes(self) -> list[list[int]]:
        return [[length, 7] for length in self.lengths]

    def whole(self, seed: int) -> Tensor:
        shape = (*self.leading, self.heads, sum(self.lengths), 3)
        return drawn(seed, shape, self.dtype)

    def by_sequence(self, whole: Tensor, rank: int) -> Tensor:
        return whole.split(self.lengths, -2)[rank]

    def by_heads(self, whole: Tensor, rank: int) -> Tensor:
        return whole.tensor_split(len(self.lengths), -3)[rank]

    def lay(self, tensor: Tensor) -> Tensor:
        return LAYOUTS[self.layout](tensor)


def cases(ranks: int) -> Iterator[Case]:
    for lengths in (EVEN, UNEVEN, WITH_EMPTY, EMPTY):
        for heads in (4, 5, 1, 0):  # that divide, that do not, fewer than ranks, none
            yield Case(lengths[:ranks], heads)
    for leading in ((), (1,), (2, 3), (0,)):
        yield Case(UNEVEN[:ranks], 5, leading)
        yield Case(UNEVEN[:ranks], 5, leading, layout="strided")
    for dtype in ALL_DTYPES:
        yield Case(UNEVEN[:ranks], 5, dtype=dtype)
    for lengths in (EVEN, UNEVEN, WITH_EMPTY):
        yield Case(lengths[:ranks], 5, layout="channels_last")
        yield Case(lengths[:ranks], 3, (2, 3), layout="channels_last_3d")


def check_transformer_case(comm: Any, case: Case, device: str) -> None:
    """Compare both functions, forward and backward, on a rank, with the unsharded tensors."""
    whole, gradient, rank = case.whole(0).to(device), case.whole(1).to(device), comm.rank
    sequence, heads = case.by_sequence, case.by_heads
    out, back = run(
        lambda x: shard_heads(x, case.shapes, comm),
        case.lay(sequence(whole, rank)),
        case.lay(heads(gradient, rank)),
    )
    expect("shard_heads", case, out, heads(whole, rank))
    expect("shard_heads, backward", case, back, sequence(gradient, rank))
    out, back = run(
        lambda x: shard_sequence(x, case.shapes, comm),
        case.lay(heads(whole, rank)),
        sequence(gradient, rank),
    )
    expect("shard_sequence", case, out, sequence(whole, rank))
    expect("shard_sequence, backward", case, back, heads(gradient, rank))
    part = case.lay(heads(whole, rank))
    one = part.new_ones(()).expand(sequence(whole, rank).shape)  # what sum().backward() sends
    _, back = run(lambda x: shard_sequence(x, case.shapes, comm), part.clone(), one)
    expect("shard_sequence, backward of a sum", case, back, torch.ones_like(part))


def check_transformer(comm: Any, device: str = "cpu") -> int:
    return len([check_transformer_case(comm, case, device) for case in cases(comm.size)])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shm(shm: RankPool, size: int) -> None:
    assert min(shm.run(check_transformer, size=size)) > 30


def test_gloo(gloo: RankPool) -> None:
    assert min(gloo.run(check_transformer)) > 30


@pytest.mark.slow
def test_mpi(mpi: RankPool) -> None:
    assert min(mpi.run(check_transformer)) > 30


def attention(comm: Any) -> None:
    """Attention over all of the sequence, computed for some heads on each rank."""
    lengths, generator = UNEVEN[: comm.size], torch.Generator().manual_seed(0)
    shapes = [[length] for length in lengths]
    whole = torch.randn(3, 2, 5, sum(lengths), 4, generator=generator, dtype=torch.float64)
    attend = torch.nn.functional.scaled_dot_product_attention
    alone = whole.clone().requires_grad_()
    expected = attend(*alone)
    expected.square().sum().backward()
    parts = whole.split(lengths, -2)[comm.rank].clone().requires_grad_()
    out = shard_sequence(attend(*(shard_heads(x, shapes, comm) for x in parts)), shapes, comm)
    out.square().sum().backward()
    assert alone.grad is not None
    torch.testing.assert_close(out, expected.split(lengths, -2)[comm.rank])
    torch.testing.assert_close(parts.grad, alone.grad.split(lengths, -2)[comm.rank])


@pytest.mark.parametrize("size", [2, 3])
def test_attention(shm: RankPool, size: int) -> None:
    shm.run(attention, size=size)


def refuse_wrong_heads(comm: Any) -> list[str]:
    lengths = (3, 2)
    shapes = [[length] for length in lengths]
    one = comm.rank == 1
    heads, sequence = torch.zeros(4, lengths[comm.rank], 2), torch.zeros(2, 5, 2)
    longer, more_heads = torch.zeros(4, 4, 2), torch.zeros(5, lengths[comm.rank], 2)
    calls = [
        (ValueError, lambda: shard_heads(longer if one else heads, shapes, comm)),
        (ValueError, lambda: shard_heads(more_heads if one else heads, shapes, comm)),
        (ValueError, lambda: shard_heads(heads[0] if one else heads, shapes, comm)),
        (ValueError, lambda: shard_heads(heads, shapes[:1] if one else shapes, comm)),
        (ValueError, lambda: shard_heads(heads.half() if one else heads, shapes, comm)),
        (ValueError, lambda: shard_sequence(sequence[:, :4] if one else sequence, shapes, comm)),
        (ValueError, lambda: shard_sequence(sequence[:1] if not one else sequence, shapes, comm)),
        (ValueError, lambda: shard_sequence(sequence[0] if one else sequence, shapes, comm)),
    ]
    texts = []
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert not isinstance(caught.value, CommunicatorError)
        texts.append(str(caught.value))
    assert shard_heads(heads, shapes, comm).shape == (2, 5, 2), "the group is not usable any more"
    return texts


@pytest.mark.parametrize("pool", ["shm", "gloo"], indirect=True)
def test_refusals(pool: RankPool) -> None:
    first, second = pool.run(refuse_wrong_heads, size=2)
    wrong = "the local shard's sequence has length 4, but shapes[1][0], this rank's, is 2"
    assert (first[0], second[0]) == (f"rank 1: {wrong}", wrong)
    assert "(4, 5, 2)" in first[1]
    assert "(5, 5, 2)" in first[1]
    assert "one shape per rank (2), got 1" in first[3]
    assert "float16" in first[4]
    assert "add up to 5, but the sequence of input_ has length 4" in first[5]
    assert first[6] == second[6] == "the ranks have [1, 2] heads, but 3 heads are split as [2, 1]"
