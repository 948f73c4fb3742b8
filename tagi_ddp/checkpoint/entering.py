"""The start of a job with a folder of checkpoints, which all its ranks must see."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from tagi_ddp.checkpoint.errors import CheckpointError
from tagi_ddp.checkpoint.folder import SEEN, Folder
from tagi_ddp.checkpoint.loading import OnDisk
from tagi_ddp.checkpoint.owner import Owner
from tagi_ddp.communicators import Communicator, all_gather_object

T = TypeVar("T")

_SEEN = 10.0  # seconds within which all ranks must see a file of rank 0
_PATIENCE = 3.0  # seconds within which a job that has ended must release the folder


def enter(folder: Folder, owner: Owner, comm: Communicator, disk: OnDisk) -> int:
    """Own a folder for a new job and clear it; return the number of the next checkpoint.

    A collective call. All ranks raise CheckpointError if another job owns it or a rank misses it.
    """
    token = folder.path / f"{SEEN}{secrets.token_hex(8)}"
    failure = f"{folder.path} has not been read"

    def begin() -> int:
        folder.path.mkdir(parents=True, exist_ok=True)
        owner.begin(_patience(comm))
        folder.clear()
        token.touch()
        return folder.next_number()

    def follow(name: str) -> bool:
        deadline = time.monotonic() + min(_SEEN, 0.4 * comm.timeout)
        while not (folder.path / name).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        owner.join(_patience(comm))
        return True

    first = comm.rank == 0
    number, problem = _attempt(partial(disk, begin, failure)) if first else (0, "")
    name, number, problem = all_gather_object(comm, (token.name, number, problem))[0]
    seen: bool | None = True
    if not first and not problem:
        seen, problem = _attempt(partial(disk, partial(follow, name), failure))
    everyone = all_gather_object(comm, (seen, problem))
    if first:
        with suppress(OSError):  # The next start removes it.
            disk(partial(token.unlink, True), failure)
    for _, text in everyone:
        if text:
            raise CheckpointError(f"folder {str(folder.path)!r} cannot be used: {text}")
    if unseen := [rank for rank, (there, _) in enumerate(everyone) if not there]:
        raise CheckpointError(
            f"folder must be where all ranks see it, but {str(folder.path)!r} of rank 0 is not "
            f"seen by ranks {unseen}: give one on a shared file system"
        )
    return int(number)


def join(folder: Folder, owner: Owner, comm: Communicator, disk: OnDisk) -> None:
    """Become a rank of the job that owns a folder; CheckpointError if another job owns it."""
    call = partial(owner.join, _patience(comm))
    _, problem = _attempt(partial(disk, call, f"{folder.path} has not been read"))
    if problem:
        raise CheckpointError(f"folder {str(folder.path)!r} cannot be used: {problem}")


def _patience(comm: Communicator) -> float:
    return min(_PATIENCE, 0.2 * comm.timeout)


def _attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return a result, or the text of an error."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
