"""The error of checkpoints."""

from __future__ import annotations

from tagi_ddp.checkpoint.array_file import DamagedFile
from tagi_ddp.communicators.equality import RanksDiffer


class CheckpointError(RanksDiffer):
    """A rank could not save or load its part; all ranks raise it."""


def is_damage(error: BaseException) -> bool:
    """Return whether an error comes from a file that is damaged or cannot be read."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return False
        if isinstance(cause, (DamagedFile, OSError)):
            return True
        cause = cause.__cause__
    return False
