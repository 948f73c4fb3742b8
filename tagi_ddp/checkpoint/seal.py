"""A checksum of JSON that the JSON itself holds, as its first field."""

from __future__ import annotations

import zlib

_FIELD, _EMPTY = "checksum", "0" * 8
UNSEALED = {_FIELD: _EMPTY}  # the first field of the JSON that `seal` takes
_MARK = f'"{_FIELD}": "'.encode()


def checksum(data: bytes | memoryview) -> str:
    """Return the CRC-32 of bytes as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def seal(data: bytes) -> bytes:
    """Return ``data`` with its checksum in the first field, which must be `UNSEALED`."""
    begin, end = _digits(data)
    return data[:begin] + checksum(data).encode() + data[end:]


def is_sealed(data: bytes) -> bool:
    """Return whether ``data`` holds a checksum; raise ValueError if it does not match."""
    if _MARK not in data:
        return False
    begin, end = _digits(data)
    own = checksum(data[:begin] + _EMPTY.encode() + data[end:]).encode()
    if data[begin:end] != own:
        raise ValueError("its checksum does not match")
    return True


def _digits(data: bytes) -> tuple[int, int]:
    begin = data.index(_MARK) + len(_MARK)
    return begin, begin + len(_EMPTY)
