"""DDPConfig: the backend, the devices, and the rank and number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from tagi_ddp.checks import integer, seconds
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.init import launched

Backend = Literal["auto", "nccl", "mpi", "shm", "gloo"]
_BACKENDS: tuple[str, ...] = get_args(Backend)


class DDPConfig:
    """The settings of distributed training, checked when they are set.

    Args:
        device_ids: the GPUs of this host's ranks, one per local rank; may be empty or anything if
            the backend works on the CPU.
        backend: "nccl" (GPUs), "shm" (processes of one host), "mpi" (mpi4py), "gloo"
            (torch.distributed) or "auto".
        rank: number of this process, 0 to world_size - 1.
        world_size: number of processes.
        timeout: the limit of every wait for other ranks, in seconds.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """

    def __init__(
        self,
        device_ids: Sequence[int],
        backend: str = "nccl",
        rank: int = 0,
        world_size: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.device_ids = device_ids
        self.backend = backend
        self._rank = 0
        self.world_size = world_size
        self.rank = rank
        self.timeout = timeout

    @classmethod
    def from_env(
        cls,
        backend: str = "auto",
        device_ids: Sequence[int] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> DDPConfig:
        """Return the settings of the launcher: rank and world size; without one, rank 0 of 1.

        Launchers: ``tagi-ddp run`` and `tagi_ddp.launch`, torchrun, Open MPI's mpirun, MPICH's
        mpiexec, srun, and others (docs/clusters.md). ``device_ids`` is one per rank of this host,
        counted from 0, by default. ``timeout`` in seconds limits every wait for other ranks: raise
        it if one of them is busy for longer, for example with an evaluation.

        Raises ValueError if the launcher's variables are malformed, or torch's default group has
        several ranks and no launcher set them; warns if the launcher and an MPI that is loaded
        already disagree, or two launchers' variables do.
        """
        environment = launched(backend)
        if device_ids is None:
            device_ids = range(environment.local_world_size)
        return cls(device_ids, backend, environment.rank, environment.world_size, timeout)

    @property
    def device_ids(self) -> list[int]:
        """The GPUs of this host's ranks."""
        return self._device_ids

    @device_ids.setter
    def device_ids(self, value: Sequence[int]) -> None:
        if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
            raise TypeError(
                f"device_ids must be a list of device numbers like [0, 1], got {value!r}"
            )
        self._device_ids = [integer(f"device_ids[{i}]", item, 0) for i, item in enumerate(value)]

    @property
    def backend(self) -> str:
        """The backend of the collectives: "auto", "nccl", "mpi", "shm" or "gloo"."""
        return self._backend

    @backend.setter
    def backend(self, value: str) -> None:
        if value not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {value!r}")
        self._backend = value

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._rank

    @rank.setter
    def rank(self, value: int) -> None:
        value = integer("rank", value)
        if not 0 <= value < self._world_size:
            raise ValueError(
                f"rank must be 0 to {self._world_size - 1} (world_size is {self._world_size}), "
                f"got {value}"
            )
        self._rank = value

    @property
    def world_size(self) -> int:
        """The number of processes; to make it smaller, set `rank` first."""
        return self._world_size

    @world_size.setter
    def world_size(self, value: int) -> None:
        value = integer("world_size", value)
        if value <= self._rank:
            raise ValueError(
                f"world_size must be at least {self._rank + 1} (rank is {self._rank}), got {value}"
            )
        self._world_size = value

    @property
    def timeout(self) -> float:
        """The limit of every wait for other ranks, in seconds."""
        return self._timeout

    @timeout.setter
    def timeout(self, value: float) -> None:
        self._timeout = seconds("timeout", value)

    def __repr__(self) -> str:
        """Return the call that makes an equal config."""
        return (
            f"DDPConfig(device_ids={self.device_ids}, backend={self.backend!r}, "
            f"rank={self.rank}, world_size={self.world_size}, timeout={self.timeout!r})"
        )

    def __eq__(self, other: object) -> bool:
        """Return whether all settings are equal."""
        return vars(self) == vars(other) if isinstance(other, DDPConfig) else NotImplemented
