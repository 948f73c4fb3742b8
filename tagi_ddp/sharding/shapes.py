"""Shapes of shards: one per rank, the full shape of that rank's part of a tensor, or its size.

The size is the part's length along the dimension that is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, overload

import torch

from tagi_ddp import checks
from tagi_ddp.communicators.buffers import equal_counts
from tagi_ddp.sharding.groups import Group, rank_and_size

Shapes = Sequence[Sequence[int]] | Sequence[int]


def get_shape_shards(
    tensor: torch.Tensor, dim: int, model_comm_group: Group = None
) -> list[list[int]]:
    """Return the shape of each rank's part of ``tensor``, split along ``dim`` as tensor_split does.

    Without a group there is one part, the whole. Local, no communication.
    """
    dim = check_dim(dim, tensor.dim())
    shape = list(tensor.shape)
    _, ranks = rank_and_size(model_comm_group)
    return [[*shape[:dim], size, *shape[dim + 1 :]] for size in equal_counts(shape[dim], ranks)]


@overload
def change_channels_in_shape(shape_list: Sequence[int], channels: int) -> list[int]: ...


@overload
def change_channels_in_shape(
    shape_list: Sequence[Sequence[int]] | None, channels: int
) -> list[list[int]]: ...


def change_channels_in_shape(shape_list: Any, channels: int) -> list[Any]:
    """Return the shapes with their last entry replaced by ``channels``; None: no shapes.

    Sizes have no channels, and stay.
    """
    shapes = shape_list or []
    return [s if isinstance(s, Integral) else [*s[:-1], channels] for s in shapes]


@dataclass(frozen=True)
class Split:
    """A tensor of shape ``shape`` split along ``dim`` into parts of ``sizes``, one per rank."""

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """The number of elements of each part."""
        width = math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])
        return [size * width for size in self.sizes]

    def part(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        return (*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :])

    def slice(self, rank: int) -> tuple[int, int, int]:
        """Return dimension, start and length of a rank's part, as `narrow` takes them."""
        return self.dim, sum(self.sizes[:rank]), self.sizes[rank]


def whole_of(shape: Sequence[int]) -> Split:
    """Return a tensor of ``shape`` as a single part."""
    return Split(tuple(shape), 0, tuple(shape[:1]) or (1,))


def split_of(tensor: torch.Tensor, dim: int, shapes: Shapes, where: tuple[int, int]) -> Split:
    """Return the split by ``shapes`` of the tensor of which ``tensor`` is this rank's part.

    Raises ValueError, IndexError or TypeError that names what does not fit.
    """
    rank, _ = where
    split = _read(tensor, dim, shapes, where)
    if split.part(rank) != tuple(tensor.shape):
        raise ValueError(
            f"the local shard has shape {tuple(tensor.shape)}, but shapes[{rank}], this rank's, "
            f"is {split.part(rank)}"
        )
    return split


def split_of_whole(tensor: torch.Tensor, dim: int, shapes: Shapes, where: tuple[int, int]) -> Split:
    """Return the split of ``tensor`` by ``shapes``; raise ValueError, ... if they do not fit."""
    split = _read(tensor, dim, shapes, where)
    if split.shape[split.dim] != tensor.shape[split.dim]:
        raise ValueError(
            f"the sizes along dimension {split.dim} in shapes add up to {split.shape[split.dim]}, "
            f"but input_ has {tensor.shape[split.dim]} there"
        )
    return split


def check_dim(dim: int, dimensions: int) -> int:
    """Return ``dim`` counted from the front; raise IndexError if there is no such dimension."""
    number = checks.integer("dim", dim)
    if not -dimensions <= number < dimensions:
        raise IndexError(f"dim is {number}, but the tensor has {dimensions} dimensions")
    return number % dimensions


def entries(shapes: Shapes, ranks: int) -> list[tuple[int, ...] | int]:
    """Return each rank's shape, or its size; raise TypeError or ValueError that names it."""
    if not isinstance(shapes, Sequence):
        raise TypeError(f"shapes must hold one shape per rank, got {type(shapes).__name__}")
    if len(shapes) != ranks:
        raise ValueError(f"shapes must hold one shape per rank ({ranks}), got {len(shapes)}")
    return [_entry(f"shapes[{rank}]", entry) for rank, entry in enumerate(shapes)]


def _entry(name: str, entry: Any) -> tuple[int, ...] | int:
    if isinstance(entry, Integral):
        return checks.integer(name, entry, 0)
    if not isinstance(entry, Iterable):
        raise TypeError(f"{name} must be a shape or a size, got {entry!r}")
    return tuple(checks.integer(name, length, 0) for length in entry)


def _read(tensor: torch.Tensor, dim: int, shapes: Shapes, where: tuple[int, int]) -> Split:
    dim = check_dim(dim, tensor.dim())
    others = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    sizes = []
    for rank, entry in enumerate(entries(shapes, where[1])):
        if isinstance(entry, int):
            sizes.append(entry)
            continue
        if (*entry[:dim], *entry[dim + 1 :]) != others or len(entry) != tensor.dim():
            raise ValueError(
                f"shapes[{rank}] is {entry}, which differs from input_'s shape "
                f"{tuple(tensor.shape)} in more than dimension {dim}"
            )
        sizes.append(entry[dim])
    return Split((*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :]), dim, tuple(sizes))
