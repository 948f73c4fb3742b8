"""The membership of a process in an elastic job, in one group after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tagi_ddp.checks import seconds
from tagi_ddp.communicators import BackendUnavailable, Communicator, PeerLost, Timeout, init
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.environment import detect, setting
from tagi_ddp.launcher.meeting import LauncherConnection, launcher_connection
from tagi_ddp.launcher.roll_call import find_source
from tagi_ddp.sequential.config import DDPConfig
from tagi_ddp.update.elastic import Calls

# Seconds. All ranks of a group connect at once: one that is late has been lost meanwhile.
_CONNECT = 0.5


@dataclass(frozen=True)
class Group:
    """The group of this process until the next one; see `roll_call.Group`."""

    communicator: Communicator
    number: int
    source: int
    behind: tuple[int, ...]
    stayed: int


class Membership(Calls, Protocol):
    """The membership of this process in an elastic job."""

    may_use_gloo: bool
    """True if the next group may connect over gloo, which needs torch."""

    def join(
        self, progress: int | None, blamed: Sequence[int], done: bool, admits: bool
    ) -> Group | None:
        """Join and return the next group; None: all are ``done``. See `LauncherConnection.join`."""
        ...


def make_membership(config: DDPConfig | None, elastic: bool | float) -> Membership:
    """Return the membership of this rank, whose launcher must outlive the ranks.

    Raises ValueError or TypeError for a wrong argument, BackendUnavailable without such a launcher.
    """
    patience = DEFAULT_TIMEOUT if elastic is True else seconds("elastic", elastic)
    if config is None:
        raise ValueError("elastic needs config, not communicator: ranks connect again")
    if config.backend == "mpi":
        return _Survivors(config, patience)
    if config.backend == "nccl":
        raise BackendUnavailable(
            "elastic is for backend 'auto', 'shm', 'gloo' or 'mpi', not 'nccl': its ranks are "
            "on the CPU"
        )
    found = launcher_connection()
    if found is None:
        raise BackendUnavailable(
            "elastic needs a launcher that outlives its ranks and makes new groups of them: "
            "start them with tagi-ddp run, or with mpirun --with-ft ulfm for backend 'mpi'"
        )
    return _Launched(config.backend, found, patience)


def _patience(seconds: float, progress: int | None) -> float:
    """Return the seconds that a rank waits for the others; more if it has only begun."""
    return seconds if progress is not None else max(seconds, DEFAULT_TIMEOUT)


class _Launched:
    """The membership under ``tagi-ddp run``, whose launcher makes the groups."""

    def __init__(self, backend: str, found: LauncherConnection, patience: float) -> None:
        launched = detect()
        one_host = launched.local_world_size == launched.world_size
        self.may_use_gloo = backend == "gloo" or (backend == "auto" and not one_host)
        self._backend = backend
        self._launcher = found
        self._patience = patience
        self._job = setting("JOB")
        self.called = found.called

    @property
    def awaited(self) -> bool:
        return self._launcher.awaited

    def join(
        self, progress: int | None, blamed: Sequence[int], done: bool, admits: bool
    ) -> Group | None:
        limit, patience = _CONNECT, _patience(self._patience, progress)
        while (own := self._launcher.join(progress, blamed, patience, done, admits)) is not None:
            own.enter(self._job)
            try:
                communicator = init(self._backend, own.rank, own.size, timeout=limit)
            except (Timeout, PeerLost) as error:
                blamed = error.ranks
                limit = min(2 * limit, self._patience)
                continue
            communicator.timeout = self._patience
            return Group(communicator, own.number, own.source, own.behind, own.stayed)
        return None


class _Survivors:
    """The membership under an MPI with fault tolerance; new ranks do not join."""

    may_use_gloo = False
    awaited = False

    def __init__(self, config: DDPConfig, patience: float) -> None:
        try:
            from tagi_ddp.communicators.network.ulfm import Survivors
        except (ImportError, RuntimeError):
            init("mpi", config.rank, config.world_size)  # This raises the cause.
            raise
        self._survivors = Survivors(_patience(patience, None))
        self._patience = patience
        self._groups = 0

    def called(self, progress: int, exchanging: bool) -> bool:
        return False

    def join(
        self, progress: int | None, blamed: Sequence[int], done: bool, admits: bool
    ) -> Group | None:
        limit, patience = _CONNECT, _patience(self._patience, progress)
        while True:
            table = self._survivors.gather([-1 if progress is None else progress, done], patience)
            if table[:, 1].all():
                return None
            source, behind = find_source([None if each < 0 else int(each) for each in table[:, 0]])
            self._groups += 1
            try:
                communicator = self._survivors.connect(limit)
            except (Timeout, PeerLost):
                limit = min(2 * limit, self._patience)
                continue
            communicator.timeout = self._patience
            return Group(communicator, self._groups, source, behind, communicator.size)
