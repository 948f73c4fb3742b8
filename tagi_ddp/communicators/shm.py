"""Ranks of one host over shared memory: the default, which needs no launcher, MPI or torch."""

from __future__ import annotations

import atexit
import hashlib

from tagi_ddp._backend import ShmCommunicator, end_shm
from tagi_ddp.communicators.guard import last_words
from tagi_ddp.environment import job_secret

__all__ = ["ShmCommunicator", "create"]


def create(
    rank: int, world_size: int, job: str, timeout: float, *, spin: bool = True, backend: str = "shm"
) -> ShmCommunicator:
    """Return this rank's communicator once all ``world_size`` ranks of ``job`` have called this.

    ``job`` tells apart the groups of one user on one host. ``timeout`` in seconds limits this call
    and is the default of every operation. Without ``spin`` waits leave the cores, even if there is
    one for each rank, to what else the ranks do meanwhile. ``backend`` is its name in errors.
    Raises Timeout naming the ranks that did not come, Mismatch when two ranks have one number or
    ranks differ in ``world_size``.
    """
    return ShmCommunicator(rank, world_size, job, meeting_name(job), timeout, spin, backend)


def meeting_name(job: str) -> str:
    """Return where the ranks of ``job`` find each other, which only the secret foretells."""
    return hashlib.blake2b(job.encode(), key=job_secret(), digest_size=24).hexdigest()


@atexit.register
def _end_with_process() -> None:
    """Let the others know why, if an error ends this process; wait for what is under way."""
    end_shm(last_words())
