"""The backend of ``torch.distributed.init_process_group("tagi_ddp")``."""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from tagi_ddp.communicators import BackendUnavailable, Communicator, init
from tagi_ddp.communicators.network import rendezvous as gloo
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.environment import detect, offers_mpi, setting
from tagi_ddp.torch_backend.process_group import NAME, ProcessGroup

_BACKENDS = ("auto", "shm", "mpi", "gloo")


def register() -> None:
    """Register the backend with torch."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Return the group of the ranks that share the store; no others call this."""
    return ProcessGroup(_connect(store, rank, size, timeout.total_seconds()))


def _connect(store: Store, rank: int, size: int, timeout: float) -> Communicator:
    backend = setting("TORCH_CARRIER") or "auto"
    if backend not in _BACKENDS:
        raise ValueError(
            f"TAGI_DDP_TORCH_CARRIER must be one of {', '.join(_BACKENDS)}, got {backend!r}"
        )
    if size == 1:
        return SingleCommunicator(timeout)
    if rank == 0:
        store.set("job", secrets.token_hex(8))
    store.set(f"host {rank}", socket.gethostname())
    hosts = {store.get(f"host {other}") for other in range(size)}
    if backend == "shm" or (backend == "auto" and len(hosts) == 1):
        return init("shm", rank, size, job=store.get("job").decode(), timeout=timeout)
    environment = detect()
    if backend == "mpi" or (backend == "auto" and offers_mpi(environment)):
        if size == environment.world_size:
            return init("mpi", rank, size, timeout=timeout)
        raise BackendUnavailable(
            f"a group of {size} of MPI's {environment.world_size} ranks on several hosts: "
            "set TAGI_DDP_TORCH_CARRIER=gloo"
        )
    return gloo.connect(store, rank, size, timeout)
