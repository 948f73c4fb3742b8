"""Floats in few bits for the wire, on tensors; see cpp_backend/update/compress.h."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp._backend import COMPRESS_BLOCK

_GREATEST, _LEAST = 3e38, 1e-37


class DeviceCodec:
    """Tensors in 8 or 16 bits."""

    def __init__(self, bits: int, device: torch.device) -> None:
        self._bits = bits
        self._device = device

    def floats(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._device)

    def units(self, before: Tensor) -> Tensor:
        variance = before.chunk(2)[1]
        return torch.cat((variance, variance.sqrt()))

    def compress(self, values: Tensor) -> Tensor:
        values[~(values.abs() <= _GREATEST)] = 0
        if self._bits == 16:
            half = values.bfloat16()
            values -= half.float()
            return half.view(torch.uint8)
        blocks = values.view(-1, COMPRESS_BLOCK)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        numbers = torch.where(scale > _LEAST, blocks / scale, 0.0).round().clamp(-127, 127)
        blocks -= numbers * scale
        signed = numbers.to(torch.int8)
        return torch.cat((scale.view(torch.uint8), signed.view(torch.uint8)), 1).flatten()

    def add(self, compressed: Tensor, values: Tensor) -> None:
        found = compressed.to(self._device)
        if self._bits == 16:
            values += found.view(torch.bfloat16).float()
            return
        blocks = found.view(-1, 4 + COMPRESS_BLOCK)
        scale = blocks[:, :4].contiguous().view(torch.float32)
        numbers = blocks[:, 4:].contiguous().view(torch.int8)
        values.view(-1, COMPRESS_BLOCK).add_(numbers.float() * scale)

    def join(self, compressed: Tensor, exact: Tensor, rows: int) -> Tensor:
        floats = exact.view(rows, len(exact) // rows)
        return torch.cat((compressed.view(rows, -1), floats.view(torch.uint8)), 1)

    def split(self, joined: Tensor, exact: int) -> tuple[Tensor, Tensor]:
        found = joined.to(self._device)
        compressed, floats = found.tensor_split((found.shape[1] - 4 * exact,), 1)
        return compressed.flatten(), floats.clone().view(torch.float32).flatten()
