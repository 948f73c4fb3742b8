"""Tensors of several shapes as one vector, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from tagi_ddp.optim.daso.ranks import AllRanksRaise


class NotFinite(AllRanksRaise, FloatingPointError):
    """NaN or infinite numbers in what all ranks have received."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether no element is NaN or infinite."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors]  # a device need not wait for each
    return all(flag.item() for flag in flags)


class Vector:
    """Tensors of one precision on one device, as one vector."""

    def __init__(self, tensors: list[Tensor], dtype: torch.dtype) -> None:
        """Remember the tensors, and the precision to compute with."""
        self._tensors = tensors
        self._dtype = dtype

    def read(self) -> Tensor:
        """Return a new vector of what the tensors hold."""
        size = sum(tensor.numel() for tensor in self._tensors)
        flat = torch.empty(size, dtype=self._dtype, device=self._tensors[0].device)
        for part, tensor in self._pairs(flat):
            part.copy_(tensor)
        return flat

    def write(self, flat: Tensor) -> None:
        """Write it to the tensors."""
        for part, tensor in self._pairs(flat):
            tensor.copy_(part)

    def _pairs(self, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        parts = flat.split([tensor.numel() for tensor in self._tensors])
        for part, tensor in zip(parts, self._tensors, strict=True):
            yield part.view_as(tensor), tensor.detach()


def vectors_of(tensors: Iterable[Tensor]) -> list[Vector]:
    """Return them as vectors of float64, where they are, and of float32."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            groups[tensor.device, wide].append(tensor)
    return [Vector(group, wide) for (_, wide), group in groups.items()]
