"""Journals of each rank's outcomes, which the other ranks of its host read if it is lost."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tagi_ddp.communicators import Communicator, all_gather_object

_LOOK = 0.1  # seconds between two reads of the journal of a rank that still works
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC

Outcomes = tuple[dict[int, str], dict[int, str]]  # by item: results as texts, errors


class Journals:
    """The files of the ranks of one host; they have no names, so they vanish with the ranks.

    A rank holds its own file's lock until it ends; the kernel releases a lock with its process.
    """

    def __init__(self, own: int | None, files: dict[int, int]) -> None:
        """Write to the descriptor ``own``, if there is one, and read the others', by rank."""
        self._own = own
        self._files = files

    def write(self, kind: str, item: int = -1, text: str = "") -> None:
        """Write the "begin", "result" or "error" of an item, or the "end" of all.

        If the disk is full, the others miss this entry and all later ones.
        """
        if self._own is not None:
            entry = json.dumps([kind, item, text]).encode() + b"\n"
            try:
                complete = os.write(self._own, entry) == len(entry)
            except OSError:
                complete = False
            if not complete:
                self._own = None

    def read(self, rank: int, items: Sequence[int], patience: float) -> Outcomes:
        """Return the outcomes of another rank's items, once it has ended.

        It waits at most ``patience`` seconds for that end. An item without an outcome has an error.
        """
        if rank not in self._files:
            return {}, dict.fromkeys(items, f"rank {rank} was lost, and with it its results\n")
        deadline = time.monotonic() + patience
        while True:
            over = _is_free(self._files[rank]) or time.monotonic() >= deadline
            found: dict[str, dict[int, str]] = {"begin": {}, "result": {}, "error": {}, "end": {}}
            for kind, item, text in _entries(self._files[rank]):
                found[kind][item] = text
            if over or found["end"]:
                break
            time.sleep(_LOOK)
        results, errors = found["result"], found["error"]
        for item in items:
            if item not in results and item not in errors:
                when = "in" if item in found["begin"] else "before"
                errors[item] = f"rank {rank} was lost {when} this item: look at its output\n"
        return results, errors


@contextlib.contextmanager
def journals(group: Communicator) -> Iterator[Journals]:
    """Open the files of this host's ranks; a collective call. One rank alone needs none."""
    if group.size == 1:
        yield Journals(None, {})
        return
    with contextlib.ExitStack() as opened:
        own, name = None, Path(tempfile.gettempdir()) / f"tagi_ddp.{secrets.token_hex(16)}"
        with contextlib.suppress(OSError):  # The disk may be full.
            own = os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            opened.callback(os.close, own)
            fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        files = {}
        try:
            for rank, theirs in enumerate(all_gather_object(group, str(name))):
                if rank != group.rank:
                    with contextlib.suppress(OSError):  # It may be on another host.
                        files[rank] = os.open(theirs, _FLAGS)
                        opened.callback(os.close, files[rank])
            group.barrier()
        finally:
            name.unlink(missing_ok=True)
        yield Journals(own, files)


def _is_free(file: int) -> bool:
    """Return whether no process holds the lock of a file."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.lockf(file, fcntl.LOCK_UN)
    return True


def _entries(file: int) -> list[Any]:
    """Return all complete entries."""
    data = bytearray()
    while piece := os.pread(file, 1 << 24, len(data)):
        data += piece
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
