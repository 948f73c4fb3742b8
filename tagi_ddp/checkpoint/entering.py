"""The start of a job with a folder of checkpoints, which all its ranks must see."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from tagi_ddp.checkpoint.disk import on_disk
from tagi_ddp.checkpoint.errors import CheckpointError
from tagi_ddp.checkpoint.folder import SEEN, Folder
from tagi_ddp.checkpoint.owner import Owner
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.equality import all_or_none

_SEEN = 10.0  # seconds within which all ranks must see a file of rank 0
_PATIENCE = 3.0  # seconds within which a job that has ended must release the folder


def enter(folder: Folder, owner: Owner, comm: Communicator, limit: float) -> int:
    """Own a folder for a new job and clear it; return the number of the next checkpoint.

    A collective call. All ranks raise CheckpointError if another job owns it or a rank misses it.
    A rank waits for the disk for ``limit`` seconds.
    """
    token = folder.path / f"{SEEN}{secrets.token_hex(8)}"
    failure = f"{folder.path} has not been read"
    together = partial(all_or_none, comm, "folders", "Give one folder.", CheckpointError)
    first, number = comm.rank == 0, 0

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

    with together(), _naming(folder):
        if first:
            number = on_disk(begin, limit, failure)
    name, number = all_gather_object(comm, (token.name, number))[0]
    try:
        with together():
            with _naming(folder):
                seen = first or on_disk(partial(follow, name), limit, failure)
            if not seen:
                raise CheckpointError(
                    f"folder must be where all ranks see it, but {str(folder.path)!r} of rank 0 is "
                    f"not seen by rank {comm.rank}: give one on a shared file system"
                )
    finally:
        if first:
            with suppress(OSError):  # The next start removes it.
                on_disk(partial(token.unlink, True), limit, failure)
    return int(number)


def join(folder: Folder, owner: Owner, comm: Communicator, limit: float) -> int:
    """Become a rank of the job that owns a folder; CheckpointError if another job owns it.

    Return 0: the other ranks know the number of the next checkpoint.
    """
    with _naming(folder):
        call = partial(owner.join, _patience(comm))
        on_disk(call, limit, f"{folder.path} has not been read")
    return 0


def _patience(comm: Communicator) -> float:
    return min(_PATIENCE, 0.2 * comm.timeout)


@contextmanager
def _naming(folder: Folder) -> Iterator[None]:
    """Turn errors of the block into CheckpointError with the folder's name."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"folder {str(folder.path)!r} cannot be used: {type(error).__name__}: {error}"
        ) from error
