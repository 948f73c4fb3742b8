"""Tensors of several shapes as one vector, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Flat:
    """Tensors, one after the other, as vectors of ``dtype`` on ``device``."""

    tensors: Sequence[Tensor]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return a vector whose elements are not set."""
        size = sum(tensor.numel() for tensor in self.tensors)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def parts(self, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each tensor and its part of the vector, a view in the tensor's shape."""
        parts = torch.split(vector, [tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            yield tensor, part.view(tensor.shape)

    def read(self) -> Tensor:
        """Return a new vector of the tensors' values."""
        vector = self.empty()
        for tensor, part in self.parts(vector):
            part.copy_(tensor.detach())
        return vector

    def write(self, vector: Tensor) -> None:
        """Write the vector to the tensors."""
        for tensor, part in self.parts(vector):
            tensor.detach().copy_(part)
