"""Atomic replacement of files."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(filename: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``filename`` at the end of the block.

    ``filename`` is unchanged after an error, a kill, or on a full disk, whose error is raised. A
    link's target is replaced, not the link. A device, which is no regular file, is written to.
    """
    path = Path(os.path.realpath(filename))
    mode = path.stat().st_mode if path.exists() else 0
    if mode and not stat.S_ISREG(mode):
        with path.open("wb") as file:
            yield file
        return
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.fdopen(_open(folder, beside), "wb") as file:
            yield file
            file.flush()
            if mode:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            os.fsync(file.fileno())
            if not beside.exists():
                # Python follows the link only if it gets a folder's descriptor, needed or not.
                os.link(f"/proc/self/fd/{file.fileno()}", beside, src_dir_fd=folder)
        os.replace(beside, path)
        os.fsync(folder)
    finally:
        beside.unlink(missing_ok=True)
        os.close(folder)


def _open(folder: int, beside: Path) -> int:
    """Open a file without a name, of which a kill leaves nothing; if impossible, ``beside``."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(".", flags | os.O_TMPFILE, 0o666, dir_fd=folder)
    except OSError:
        return os.open(beside, flags | os.O_CREAT | os.O_EXCL, 0o666)
