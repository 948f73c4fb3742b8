"""Memory of the C library, of which a sanitizer notices each read outside."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype = ctypes.c_void_p
_LIBC.malloc.argtypes = [ctypes.c_size_t]
_LIBC.free.argtypes = [ctypes.c_void_p]


class Memory:
    """Blocks of memory that live as long as this."""

    def __init__(self) -> None:
        self._blocks: list[int] = []

    def store(self, data: bytes) -> int:
        """Return the address of a block that holds ``data``."""
        address: int = _LIBC.malloc(max(1, len(data)))
        self._blocks.append(address)
        ctypes.memmove(address, data, len(data))
        return address

    def __del__(self) -> None:
        for block in self._blocks:
            _LIBC.free(block)
