"""Ranks of one host over shared memory: the default, which needs no launcher, MPI or torch."""

from __future__ import annotations

import atexit
import hashlib

from tagi_ddp._backend import ShmCommunicator, end_shm
from tagi_ddp.communicators.equality import package_version
from tagi_ddp.communicators.guard import uncaught_error
from tagi_ddp.environment import job_secret

__all__ = ["ShmCommunicator", "create"]


def create(
    rank: int, world_size: int, job: str, timeout: float, *, spin: bool = True, backend: str = "shm"
) -> ShmCommunicator:
    """Return this rank's communicator once all ``world_size`` ranks of ``job`` have called this.

    ``job`` distinguishes the groups of one user on one host. ``timeout`` in seconds limits this
    call and is the default of every operation. Without ``spin`` waits yield the cores to other work
    of the ranks, even if there is one for each rank. ``backend`` is its name in errors. Raises
    Timeout that names the missing ranks, Mismatch if two ranks have one number or ranks differ in
    ``world_size`` or in their version of this package.
    """
    name, version = rendezvous_name(job), package_version()
    return ShmCommunicator(rank, world_size, job, name, timeout, spin, backend, version)


def rendezvous_name(job: str) -> str:
    """Return the name at which the ranks of ``job`` connect; only the secret predicts it."""
    return hashlib.blake2b(job.encode(), key=job_secret(), digest_size=24).hexdigest()


@atexit.register
def _end_with_process() -> None:
    """Wait for operations under way; if an error ends this process, abort with its text before."""
    end_shm(uncaught_error())
