"""Split, gather and sum tensors over the ranks of a group, differentiably.

``mgroup`` is a communicator, a torch process group, or None; with None or a group of one the
functions return a copy. ``shapes`` holds the full shape of each rank's part; only entry ``dim`` may
differ between ranks, and may be 0. That entry, the size, may replace the shape: ``[4, 3]`` stands
for ``[[4, 2], [3, 2]]`` along dimension 0. Results are contiguous in the input's memory format,
have its dtype and share no memory with it.

Tensors are of floats, integers, complex numbers or bools; bools have no sum, and sparse tensors are
refused.

A wrong argument raises a ValueError or IndexError. If ranks communicate, all of them raise, even if
the argument is wrong on one rank only, before any tensor is sent. That costs a small all-gather in
each forward that communicates, none in backward.
"""

from __future__ import annotations

import torch

from tagi_ddp.sharding.collectives import (
    Transport,
    apply,
    check_dense,
    handshake,
    over_ranks,
    own_part,
)
from tagi_ddp.sharding.groups import Group, communicator, rank_and_size
from tagi_ddp.sharding.shapes import Shapes, Split, split_of, split_of_whole
from tagi_ddp.sharding.utils import get_memory_format


def shard_tensor(
    input_: torch.Tensor, dim: int, shapes: Shapes, mgroup: Group, gather_in_backward: bool = True
) -> torch.Tensor:
    """Return this rank's part of ``input_``, which all ranks have; no communication.

    Backward gathers the ranks' gradients; with ``gather_in_backward=False`` it does not
    communicate either, and the gradient is zero outside of this rank's part.
    """
    return over_ranks(_shard, input_, dim, shapes, gather_in_backward, mgroup=mgroup)


def gather_tensor(input_: torch.Tensor, dim: int, shapes: Shapes, mgroup: Group) -> torch.Tensor:
    """Return all ranks' parts, concatenated along ``dim``.

    Backward keeps this rank's part of the gradient: right if all ranks do the same with the result.
    """
    return over_ranks(_gather, input_, "gather_tensor", dim, shapes, mgroup=mgroup)


def sync_tensor(input_: torch.Tensor, dim: int, shapes: Shapes, mgroup: Group) -> torch.Tensor:
    """Return all ranks' parts, concatenated along ``dim``.

    Backward sums the ranks' gradients and keeps this rank's part: right if the ranks do different
    things with the result.
    """
    return over_ranks(_gather, input_, "sync_tensor", dim, shapes, mgroup=mgroup)


def reduce_tensor(input_: torch.Tensor, mgroup: Group) -> torch.Tensor:
    """Return the sum of all ranks' ``input_``; backward passes the gradient on."""
    return over_ranks(_reduce, input_, mgroup=mgroup)


def reduce_shard_tensor(
    input_: torch.Tensor, dim: int, shapes: Shapes, mgroup: Group
) -> torch.Tensor:
    """Return this rank's part, along ``dim``, of the sum of all ranks' ``input_``.

    Backward gathers the ranks' gradients.
    """
    return over_ranks(_reduce_shard, input_, dim, shapes, mgroup=mgroup)


def _shard(
    input_: torch.Tensor, dim: int, shapes: Shapes, gather_in_backward: bool, mgroup: Group
) -> torch.Tensor:
    rank, _ = where = rank_and_size(mgroup)
    check_dense(input_)
    split = split_of_whole(input_, dim, shapes, where)
    own = get_memory_format(input_)

    def gather(gradient: torch.Tensor) -> torch.Tensor:
        # The ranks have not compared their memory formats, so buffers have the usual one.
        transport = Transport(communicator(mgroup, gradient.device), torch.contiguous_format, own)
        return transport.gather(gradient, split)

    def fill(gradient: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(split.shape, dtype=gradient.dtype, device=gradient.device).contiguous(
            memory_format=own
        )
        whole.narrow(*split.slice(rank)).copy_(gradient)
        return whole

    return apply(
        input_,
        lambda whole: own_part(whole, split, rank, own),
        gather if gather_in_backward else fill,
    )


def _gather(
    input_: torch.Tensor, name: str, dim: int, shapes: Shapes, mgroup: Group
) -> torch.Tensor:
    rank, _ = where = rank_and_size(mgroup)
    transport, split, _ = handshake(
        name, input_, mgroup, lambda: split_of(input_, dim, shapes, where)
    )

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        if name == "sync_tensor":
            return transport.reduce_scatter(gradient, split)
        return own_part(gradient, split, rank, transport.own)

    return apply(input_, lambda part: transport.gather(part, split), backward)


def _reduce(input_: torch.Tensor, mgroup: Group) -> torch.Tensor:
    def check() -> tuple[int, ...]:
        _check_sum("reduce_tensor", input_)
        return tuple(input_.shape)

    transport, _, _ = handshake("reduce_tensor", input_, mgroup, check)
    return apply(input_, transport.all_reduce, lambda gradient: gradient)


def _reduce_shard(input_: torch.Tensor, dim: int, shapes: Shapes, mgroup: Group) -> torch.Tensor:
    where = rank_and_size(mgroup)

    def check() -> Split:
        _check_sum("reduce_shard_tensor", input_)
        return split_of_whole(input_, dim, shapes, where)

    transport, split, _ = handshake("reduce_shard_tensor", input_, mgroup, check)
    return apply(
        input_,
        lambda whole: transport.reduce_scatter(whole, split),
        lambda gradient: transport.gather(gradient, split),
    )


def _check_sum(name: str, input_: torch.Tensor) -> None:
    """Raise TypeError if tensors of this dtype have no sum."""
    if input_.dtype == torch.bool:
        raise TypeError(f"input_ of {name} has dtype bool, which has no sum: give it as integers")
