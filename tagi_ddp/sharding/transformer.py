"""Splits of attention by heads or by sequence, exchanged differentiably by all-to-all.

Tensors are (..., heads, sequence, channels). In parallel attention each rank has the whole sequence
for some heads; elsewhere it has all heads for a part of the sequence. Heads are split as
tensor_split does, the sequence by ``shapes``: ``shapes[r][0]``, or ``shapes[r]`` if that is a
number, is its length on rank r. A rank may have no heads, or no sequence. ``mgroup``, dtypes and
errors are as in `tagi_ddp.sharding.graph`.
"""

from __future__ import annotations

import torch

from tagi_ddp.communicators.buffers import equal_counts
from tagi_ddp.sharding.collectives import apply, handshake, over_ranks
from tagi_ddp.sharding.groups import Group, rank_and_size
from tagi_ddp.sharding.shapes import Shapes, Split, entries

_HEADS, _SEQUENCE = -3, -2


def shard_heads(input_: torch.Tensor, shapes: Shapes, mgroup: Group) -> torch.Tensor:
    """Turn (..., heads, local sequence, channels) into (..., local heads, sequence, channels)."""
    return over_ranks(_shard_heads, input_, shapes, mgroup=mgroup)


def shard_sequence(input_: torch.Tensor, shapes: Shapes, mgroup: Group) -> torch.Tensor:
    """Turn (..., local heads, sequence, channels) into (..., heads, local sequence, channels)."""
    return over_ranks(_shard_sequence, input_, shapes, mgroup=mgroup)


def _shard_heads(input_: torch.Tensor, shapes: Shapes, mgroup: Group) -> torch.Tensor:
    rank, ranks = rank_and_size(mgroup)

    def check() -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the whole, and the lengths of the sequence's parts."""
        lengths = _lengths(input_, shapes, ranks)
        if input_.shape[_SEQUENCE] != lengths[rank]:
            raise ValueError(
                f"the local shard's sequence has length {input_.shape[_SEQUENCE]}, but "
                f"shapes[{rank}][0], this rank's, is {lengths[rank]}"
            )
        return (*input_.shape[:_SEQUENCE], sum(lengths), input_.shape[-1]), lengths

    transport, (shape, lengths), _ = handshake("shard_heads", input_, mgroup, check)
    by_heads, by_sequence = _splits(shape, lengths, rank)
    return apply(
        input_,
        lambda tensor: transport.all_to_all(tensor, by_heads, by_sequence),
        lambda gradient: transport.all_to_all(gradient, by_sequence, by_heads),
    )


def _shard_sequence(input_: torch.Tensor, shapes: Shapes, mgroup: Group) -> torch.Tensor:
    rank, ranks = rank_and_size(mgroup)

    def check() -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape without the heads, and the lengths of the sequence's parts."""
        lengths = _lengths(input_, shapes, ranks)
        if input_.shape[_SEQUENCE] != sum(lengths):
            raise ValueError(
                f"the lengths in shapes add up to {sum(lengths)}, but the sequence of input_ has "
                f"length {input_.shape[_SEQUENCE]}"
            )
        return (*input_.shape[:_HEADS], *input_.shape[_SEQUENCE:]), lengths

    transport, (others, lengths), heads = handshake(
        "shard_sequence", input_, mgroup, check, lambda: input_.shape[_HEADS]
    )
    if heads != equal_counts(sum(heads), ranks):
        raise ValueError(
            f"the ranks have {heads} heads, but {sum(heads)} heads are split as "
            f"{equal_counts(sum(heads), ranks)}"
        )
    shape = (*others[:_SEQUENCE], sum(heads), *others[_SEQUENCE:])
    by_heads, by_sequence = _splits(shape, lengths, rank)
    return apply(
        input_,
        lambda tensor: transport.all_to_all(tensor, by_sequence, by_heads),
        lambda gradient: transport.all_to_all(gradient, by_heads, by_sequence),
    )


def _lengths(input_: torch.Tensor, shapes: Shapes, ranks: int) -> tuple[int, ...]:
    """Return the lengths of the sequence's parts."""
    if input_.dim() < -_HEADS:
        raise ValueError(
            "input_ must have the dimensions (..., heads, sequence, channels), got "
            f"{input_.dim()} dimensions"
        )
    found = entries(shapes, ranks)
    for rank, entry in enumerate(found):
        if entry == ():
            raise ValueError(f"shapes[{rank}] must begin with the sequence's length, got nothing")
    return tuple(entry if isinstance(entry, int) else entry[0] for entry in found)


def _splits(shape: tuple[int, ...], lengths: tuple[int, ...], rank: int) -> tuple[Split, Split]:
    """Return two splits of a rank's tensors, if the whole has ``shape``: of its part of the
    sequence by heads, and of its heads by sequence.
    """
    *leading, heads, sequence, channels = shape
    parts = tuple(equal_counts(heads, len(lengths)))
    at = len(leading)
    return (
        Split((*leading, heads, lengths[rank], channels), at, parts),
        Split((*leading, parts[rank], sequence, channels), at + 1, lengths),
    )
