"""Safetensors files of arrays, each byte of which a checksum covers.

The metadata have four texts: "checksum", of the header and its length; "checksums", of the arrays,
in the order in which they lie in the file; "save", a label of what the file belongs to; and "tree",
which is the caller's. Files of earlier versions have a tree alone.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.checkpoint.seal import UNSEALED, checksum, is_sealed, seal

# Bytes of an element, by the name that safetensors has for a dtype.
_BYTES = {"BOOL": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_BYTES.update({f"{kind}{bits}": bits // 8 for kind in "IU" for bits in (8, 16, 32, 64)})
_METADATA, _TREE = "__metadata__", "tree"
_KEYS = {*UNSEALED, "checksums", "save", _TREE}
_PIECE = 1 << 22  # bytes that are read at a time to be verified


class DamagedFile(ValueError):
    """A file is no checkpoint, or not all of one, or not as it was written."""


@dataclass(frozen=True)
class Leaf:
    """An array or tensor: its dtype as safetensors names it, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def write_arrays(file: BinaryIO, leaves: Mapping[str, Leaf], tree: str, save: str) -> None:
    """Write arrays, a tree and a label.

    The format's own library keeps all of Python from running until it has written.
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
class _Place:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str | None


class ArrayFile:
    """An open file whose header is verified; a context manager.

    Attributes:
        tree: the tree that was given to `write_arrays`.
        save: the label.
        sealed: False for a file of an earlier version, which has no checksums.

    Raises:
        DamagedFile: from all methods, naming the file.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            with naming(path):
                self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ArrayFile:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.close()

    def array(self, name: str) -> Leaf:
        """Return a copy of an array, verified."""
        place = self._places[name]
        data = np.empty(place.end - place.begin, np.uint8)
        self._file.seek(self._start + place.begin)
        if self._file.readinto(data.data) != data.size:
            raise DamagedFile(f"{self._path} ends within {name}")
        if place.checksum not in (None, checksum(data.data)):
            raise self._refusal(name)
        return Leaf(place.dtype, place.shape, data)

    def verify(self) -> None:
        """Read all arrays, and compare their checksums."""
        for name, place in self._places.items():
            self._file.seek(self._start + place.begin)
            left, sum_ = place.end - place.begin, 0
            while left:
                piece = self._file.read(min(left, _PIECE))
                if not piece:
                    raise DamagedFile(f"{self._path} ends within {name}")
                left, sum_ = left - len(piece), zlib.crc32(piece, sum_)
            if place.checksum not in (None, f"{sum_:08x}"):
                raise self._refusal(name)

    def _refusal(self, name: str) -> DamagedFile:
        return DamagedFile(f"{self._path} is damaged: {name} has another checksum")

    def _read_header(self) -> None:
        whole = os.fstat(self._file.fileno()).st_size
        length = self._file.read(8)
        (size,) = struct.unpack("<Q", length)
        self._start = 8 + size
        if self._start > whole:
            raise ValueError(f"it has {whole} bytes, and its header ends at {self._start}")
        text = self._file.read(size)
        self.sealed = is_sealed(length + text)
        entries = json.loads(text)
        metadata = entries.pop(_METADATA)
        if set(metadata) != (_KEYS if self.sealed else {_TREE}):
            raise ValueError(f"its metadata are {sorted(metadata)}")
        self.tree: str = metadata[_TREE]
        self.save: str = metadata["save"] if self.sealed else ""
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        sums = metadata["checksums"].split() if self.sealed else [None] * len(ordered)
        self._places: dict[str, _Place] = {}
        at = 0
        for (name, entry), sum_ in zip(ordered, sums, strict=True):
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if begin != at or any(type(n) is not int or n < 0 for n in (end, *shape)):
                raise ValueError(f"{name} has the shape {shape} at {begin}")
            if end - begin != math.prod(shape) * _BYTES[entry["dtype"]]:
                raise ValueError(f"{name} has {end - begin} bytes for the shape {shape}")
            self._places[name] = _Place(entry["dtype"], shape, begin, end, sum_)
            at = end
        if self._start + at != whole:
            raise ValueError(f"it has {whole} bytes, not {self._start + at}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise DamagedFile that names a file for what its content makes the block raise."""
    try:
        yield
    except (DamagedFile, OSError, MemoryError, ImportError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise DamagedFile(f"{path} is no checkpoint, or not all of one: {kind}: {error}") from error
