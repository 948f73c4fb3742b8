"""Floats in few bits for the wire, on the host; see cpp_backend/update/compress.h."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp._backend import add_decompressed, compress, compressed_bytes
from tagi_ddp.engine.buffers import FloatArray


class Codec:
    """Numpy arrays in 8 or 16 bits."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def floats(self, count: int) -> FloatArray:
        return np.zeros(count, np.float32)

    def units(self, before: FloatArray) -> FloatArray:
        variance = before[len(before) // 2 :]
        return np.concatenate([variance, np.sqrt(variance)])

    def compress(self, values: FloatArray) -> NDArray[Any]:
        out = np.empty(compressed_bytes(len(values), self._bits), np.uint8)
        compress(values, self._bits, out)
        return out

    def add(self, compressed: NDArray[Any], values: FloatArray) -> None:
        add_decompressed(compressed, self._bits, values)

    def join(self, compressed: NDArray[Any], exact: FloatArray, rows: int) -> NDArray[Any]:
        floats = exact.reshape(rows, len(exact) // rows)
        return np.concatenate([compressed.reshape(rows, -1), floats.view(np.uint8)], axis=1)

    def split(self, joined: NDArray[Any], exact: int) -> tuple[NDArray[Any], FloatArray]:
        end = joined.shape[1] - 4 * exact
        compressed, floats = (np.ascontiguousarray(part) for part in np.split(joined, [end], 1))
        return compressed.reshape(-1), floats.view(np.float32).reshape(-1)
