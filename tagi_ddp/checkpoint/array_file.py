"""Safetensors files of arrays, with checksums of every byte.

The metadata have four texts: "checksum", of the header and its length; "checksums", of the arrays,
in the order of the file; "save", a label of the save that the file belongs to; and "tree", the
caller's text. Files of earlier versions have a tree only.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_FIELD, _EMPTY = "checksum", "0" * 8
UNSEALED = {_FIELD: _EMPTY}  # the first field of the JSON that `seal` takes
_MARK = f'"{_FIELD}": "'.encode()
_METADATA, _TREE = "__metadata__", "tree"
_KEYS = {*UNSEALED, "checksums", "save", _TREE}
_PIECE = 1 << 22  # bytes that are read at once to verify them


class DamagedFile(ValueError):
    """The error of a file that is no checkpoint, is incomplete, or is damaged."""


@dataclass(frozen=True)
class Leaf:
    """An array or tensor: its dtype as safetensors names it, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def write_arrays(file: BinaryIO, leaves: Mapping[str, Leaf], tree: str, save: str) -> None:
    """Write arrays, a tree and a label.

    The format's own library would block all Python threads until it has written.
    """
    ordered = sorted(leaves.items(), key=lambda item: item[1].data.size % 8)
    sums = " ".join(checksum(leaf.data.data) for _, leaf in ordered)
    metadata = {**UNSEALED, "save": save, "checksums": sums, _TREE: tree}
    entries: dict[str, Any] = {_METADATA: metadata}
    begin = 0
    for name, leaf in ordered:
        end = begin + leaf.data.size
        entries[name] = {"dtype": leaf.dtype, "shape": leaf.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write(seal(struct.pack("<Q", len(text)) + text))
    for _, leaf in ordered:
        file.write(leaf.data.data)


@dataclass(frozen=True)
class _Span:
    begin: int
    end: int
    checksum: str | None


class ArrayFile:
    """An open file whose header is verified; a context manager.

    Attributes:
        tree: the tree that `write_arrays` wrote.
        save: the label.
        sealed: False for a file of an earlier version, which has no checksums.

    Raises:
        DamagedFile: from all methods, naming the file.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as opened, naming(path):
            self._file = opened.enter_context(path.open("rb"))
            header = self._read_header()
            self.sealed = is_sealed(header)
            self._arrays: Any = opened.enter_context(_safe_open(path, "np"))
            metadata = self._arrays.metadata() or {}
            if set(metadata) != (_KEYS if self.sealed else {_TREE}):
                raise ValueError(f"its metadata are {sorted(metadata)}")
            self.tree: str = metadata[_TREE]
            self.save: str = metadata["save"] if self.sealed else ""
            self._start = len(header)
            self._spans = _spans(header[8:], metadata.get("checksums"))
            self._opened = opened.pop_all()

    def __enter__(self) -> ArrayFile:
        """Return the file itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._opened.close()

    def array(self, name: str) -> Any:
        """Return a copy of an array, verified."""
        self._verify(name)
        with naming(self._path):
            return self._arrays.get_tensor(name)

    def tensor(self, name: str) -> Any:
        """Return a copy of a tensor, verified."""
        self._verify(name)
        with naming(self._path), _safe_open(self._path, "pt") as tensors:
            return tensors.get_tensor(name)

    def verify(self) -> None:
        """Read all arrays, and compare their checksums."""
        for name in self._spans:
            self._verify(name)

    def _verify(self, name: str) -> None:
        span = self._spans[name]
        if span.checksum is None:
            return
        self._file.seek(self._start + span.begin)
        left, sum_ = span.end - span.begin, 0
        while left and (piece := self._file.read(min(left, _PIECE))):
            left, sum_ = left - len(piece), zlib.crc32(piece, sum_)
        if span.checksum != f"{sum_:08x}":
            raise DamagedFile(f"{self._path} is damaged: the checksum of {name} does not match")

    def _read_header(self) -> bytes:
        """Return the header's length and the header."""
        whole = os.fstat(self._file.fileno()).st_size
        length = self._file.read(8)
        (size,) = struct.unpack("<Q", length)
        if size > whole:
            raise ValueError(f"it has {whole} bytes, and its header has {size}")
        return length + self._file.read(size)


def _safe_open(path: Path, framework: str) -> Any:
    from safetensors import safe_open  # Imported on use: `import tagi_ddp` is quick.

    return safe_open(path, framework=framework)


def _spans(header: bytes, checksums: str | None) -> dict[str, _Span]:
    """Return the bytes of each array in the data, by name, and its checksum if there is one."""
    entries = json.loads(header)
    entries.pop(_METADATA)
    offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
    ordered = sorted(offsets, key=offsets.__getitem__)
    sums = [None] * len(ordered) if checksums is None else checksums.split()
    pairs = zip(ordered, sums, strict=True)
    return {name: _Span(offsets[name][0], offsets[name][1], sum_) for name, sum_ in pairs}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors that a file's content causes in the block into DamagedFile with its name."""
    try:
        yield
    except (DamagedFile, OSError, MemoryError, ImportError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise DamagedFile(f"{path} is no checkpoint, or not all of one: {kind}: {error}") from error


# --- a checksum of JSON that the JSON itself holds, as its first field -------------------------


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
