"""Files of images and labels in the format of MNIST."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt


def read_idx(path: str | Path) -> npt.NDArray[np.uint8]:
    """Return the array of bytes in an idx file, gzipped if the name ends in ``.gz``.

    MNIST's images are [images, 28, 28], its labels [images]. Raises ValueError if the file is
    something else or incomplete.
    """
    path = Path(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no idx file of bytes: it begins with {data[:4].hex() or '-'}")
    start = 4 + 4 * data[3]
    if len(data) >= start:
        shape = tuple(np.frombuffer(data[4:start], dtype=">u4").tolist())
        if len(data) == start + math.prod(shape):
            return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    raise ValueError(f"{path} has {len(data)} bytes, not as many as its header says")
