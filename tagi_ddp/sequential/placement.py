"""The communicator and the device of a replica, by the settings."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

from tagi_ddp.communicators import Communicator, as_communicator, init
from tagi_ddp.communicators.config import DDPConfig
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.engine.layers import walk
from tagi_ddp.environment import detect, setting
from tagi_ddp.replica import Replica
from tagi_ddp.replica.host import attach

# The threads of a Sequential and of its layers before a call of set_threads.
_ENGINE_DEFAULT_THREADS, _LAYER_DEFAULT_THREADS = 1, 4


def bring_together(
    config: DDPConfig | None, communicator: Communicator | Any | None, device: str | None
) -> tuple[Communicator, str]:
    """Return the communicator of either argument, and the device of this rank's replica."""
    if (config is None) == (communicator is None):
        raise TypeError("give either config or communicator")
    if not isinstance(config, DDPConfig | None):
        raise TypeError(f"config must be a DDPConfig, got a {type(config).__name__}")
    return _adopt(communicator, device) if config is None else _connect(config, device)


def _connect(config: DDPConfig, device: str | None) -> tuple[Communicator, str]:
    """Return the communicator of ``config``'s ranks and the device of this rank's replica.

    For NCCL the replica lives on this rank's GPU: ``device``, or that of the local rank. If there
    are GPUs but no NCCL, deltas go over the host, by the communicator of "auto", which is slower;
    this warns. Raises BackendUnavailable if there is no GPU, ValueError if a launcher has started
    other ranks than those that ``config`` names: each would train alone.
    """
    _check_launcher(config)
    backend = config.backend
    connect = partial(init, rank=config.rank, world_size=config.world_size, timeout=config.timeout)
    if backend == "nccl" and device is None:
        device = f"cuda:{_local_device(config)}"
    on_gpu = device is not None and device.startswith("cuda")
    if config.world_size > 1 and (backend == "nccl" or (backend == "auto" and on_gpu)):
        from tagi_ddp.communicators.nccl import NcclMissing

        try:
            return connect("nccl", device=device), str(device)
        except NcclMissing as error:
            warnings.warn(
                f"deltas go over the host, which is slower: {error}", RuntimeWarning, stacklevel=3
            )
            backend = "auto"
    if backend == "nccl":
        backend = "auto"  # a world of one
    return connect(backend), device or "cpu"


def _check_launcher(config: DDPConfig) -> None:
    environment = detect()
    launched = environment.rank, environment.world_size
    if environment.world_size > 1 and launched != (config.rank, config.world_size):
        raise ValueError(
            f"config is rank {config.rank} of {config.world_size}, but the launcher "
            f"({environment.launcher}) started this process as rank {environment.rank} of "
            f"{environment.world_size}: use DDPConfig.from_env(), or give communicator= for other "
            "groups of ranks, as init().split() makes them; init(rank=0, world_size=1) is one rank "
            "alone"
        )


def _adopt(group: object, device: str | None) -> tuple[Communicator, str]:
    """Return the caller's communicator, or that of its process group, and the replica's device."""
    communicator = as_communicator(group)
    return communicator, device or communicator.device


def attach_replica(model: Any, device: str, communicator: Communicator) -> Replica:
    """Return the state of ``model``, for a replica on ``device``.

    Raises ValueError if ``communicator`` does not reach that device, or if there are several ranks
    and a layer mixes the samples of a batch.
    """
    mixing = [layer.name for layer in walk(model) if layer.kind.startswith("MultiheadAttention")]
    if mixing and communicator.size > 1:
        raise ValueError(
            f"layer {mixing[0]}: the engine's attention mixes the samples of a batch, so ranks "
            "that have parts of it would train another network than one process. Train on one rank"
        )
    if device == "cpu" and communicator.device != "cpu":
        raise ValueError(
            f"the communicator works on {communicator.device}, but the replica lives on the CPU: "
            "give device= and compute='torch', or another backend"
        )
    return attach(model)


def _local_device(config: DDPConfig) -> int:
    """Return the number of this rank's GPU."""
    environment = detect()
    # Processes that were started by hand are taken to be on one host.
    local = config.rank if environment.launcher == "none" else environment.local_rank
    if config.device_ids in ([], list(range(environment.local_world_size))):  # the defaults
        from tagi_ddp.communicators.nccl import local_device

        return local_device(local)
    if local >= len(config.device_ids):
        raise ValueError(
            f"device_ids has {len(config.device_ids)} entries, none for local rank {local}: give "
            "one for each rank of this host"
        )
    return config.device_ids[local]


def threads_for(
    model: Any, replica: Replica, communicator: Communicator
) -> tuple[int | None, bool]:
    """Return the number of threads of this rank, and whether it is its share of the cores.

    It is None if the user has set the engine's threads, which then stay, or what OMP_NUM_THREADS
    says, unless our launcher has set that.
    """
    layers = {layer.handle.num_threads for layer in replica.layers}
    share = topology_of(communicator).share_of_cores(communicator.rank)
    if (model._cpp_backend.num_threads, layers) != (
        _ENGINE_DEFAULT_THREADS,
        {_LAYER_DEFAULT_THREADS},
    ):
        return None, False
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if threads.isdecimal() and int(threads) > 0 and threads != setting("THREADS"):
        return int(threads), False
    return share, True


def require_sequential(model: Any) -> None:
    """Raise TypeError unless it is a pytagi Sequential."""
    if not hasattr(model, "_cpp_backend"):
        raise TypeError(f"model must be a pytagi Sequential, got a {type(model).__name__}")
    from pytagi.nn import Sequential

    for name in ("step", "__call__"):
        if getattr(type(model), name, None) is not getattr(Sequential, name):
            raise TypeError(
                f"model is a {type(model).__name__}, whose own {name}() nobody would call: do that "
                "around the wrapped model, or override forward() or backward()"
            )
