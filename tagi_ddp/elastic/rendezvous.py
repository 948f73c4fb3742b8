"""The rendezvous of a rank with the others of an elastic job, in one group after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from tagi_ddp.checks import seconds
from tagi_ddp.communicators import BackendUnavailable, Communicator, PeerLost, Timeout, init
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.config import DDPConfig
from tagi_ddp.elastic.connection import LauncherConnection, launcher_connection
from tagi_ddp.elastic.exchange import Calls
from tagi_ddp.elastic.messages import Assignment, JoinRequest, find_source
from tagi_ddp.environment import detect, setting

# Seconds. All ranks of a group connect at once: one that is late has been lost meanwhile.
_CONNECT = 0.5


class Rendezvous(Calls, Protocol):
    """The rendezvous of this rank with the others of each next group."""

    may_use_gloo: bool
    """True if the next group may connect over gloo, which needs torch."""

    def join(self, request: JoinRequest) -> tuple[Communicator, Assignment] | None:
        """Join the next group; return it and this rank's assignment, or None if all are done."""
        ...


def make_rendezvous(config: DDPConfig | None, elastic: bool | float) -> Rendezvous:
    """Return the rendezvous of this rank, whose launcher must outlive the ranks.

    Raises ValueError or TypeError for a wrong argument, BackendUnavailable without such a launcher.
    """
    if config is None:
        raise ValueError("elastic needs config, not communicator: ranks connect again")
    patience = config.timeout if elastic is True else seconds("elastic", elastic)
    if config.backend == "mpi":
        return _AmongSurvivors(config, patience)
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
    return _ByLauncher(config.backend, found, patience)


def _patience(seconds: float, progress: int | None) -> float:
    """Return the seconds that a rank waits for the others; more if it has only begun."""
    return seconds if progress is not None else max(seconds, DEFAULT_TIMEOUT)


class _ByLauncher:
    """The rendezvous under ``tagi-ddp run``, whose launcher makes the groups."""

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

    def join(self, request: JoinRequest) -> tuple[Communicator, Assignment] | None:
        limit = _CONNECT
        request = replace(request, patience=_patience(self._patience, request.progress))
        while (own := self._launcher.join(request)) is not None:
            own.enter(self._job)
            try:
                communicator = init(self._backend, own.rank, own.size, timeout=limit)
            except (Timeout, PeerLost) as error:
                request = replace(request, blamed=error.ranks)
                limit = min(2 * limit, self._patience)
                continue
            communicator.timeout = self._patience
            return communicator, own
        return None


class _AmongSurvivors:
    """The rendezvous under an MPI with fault tolerance; new ranks do not join."""

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

    def join(self, request: JoinRequest) -> tuple[Communicator, Assignment] | None:
        limit, progress = _CONNECT, -1 if request.progress is None else request.progress
        patience = _patience(self._patience, request.progress)
        while True:
            table = self._survivors.gather([progress, request.done], patience)
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
            rank, size = communicator.rank, communicator.size
            return communicator, Assignment(self._groups, rank, size, source, behind, stayed=size)
