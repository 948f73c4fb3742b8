"""The ranks that train together: torch.distributed's default group, and its nodes."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from tagi_ddp.communicators import Communicator, CommunicatorError, all_gather_object, init
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.equality import Gather, all_or_none
from tagi_ddp.communicators.guard import abort
from tagi_ddp.communicators.topology import Location, Topology, topology_of
from tagi_ddp.environment import detect, rendezvous_endpoint
from tagi_ddp.sharding.groups import communicator as communicator_of
from tagi_ddp.torch_backend.operations import all_gather_values
from tagi_ddp.torch_backend.process_group import ProcessGroup


def world() -> dist.ProcessGroup:
    """Return torch's default group, which must be initialised."""
    group = dist.group.WORLD
    assert group is not None
    return group


def communicator() -> Communicator:
    """Return the communicator of torch's default group for tensors on the CPU."""
    return communicator_of(world(), torch.device("cpu"))


def initialise(timeout: float = DEFAULT_TIMEOUT) -> None:
    """Make torch's default group of the launcher's ranks, unless there is one; collective.

    ``timeout`` in seconds limits this call and every later wait.

    Without GPUs its backend is "tagi_ddp". With GPUs it is NCCL for tensors on them, else gloo, and
    this rank's device is that of its local rank. The group is destroyed when the process ends.

    Raises RuntimeError that says how to initialise.
    """
    if dist.is_initialized():
        return
    environment = detect()
    backend = "tagi_ddp"
    if torch.cuda.is_available():
        torch.cuda.set_device(environment.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    rank, size = environment.rank, environment.world_size
    try:
        if size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            _rendezvous(backend, rank, size, timedelta(seconds=timeout))
    except (ValueError, RuntimeError, CommunicatorError) as error:
        raise RuntimeError(
            f"rank {rank} of {size} could not initialise torch.distributed ({error}): set "
            "MASTER_ADDR to rank 0's host and MASTER_PORT to a free port on all ranks, or call "
            "torch.distributed.init_process_group before"
        ) from error
    atexit.register(_leave, weakref.ref(world()))


def _rendezvous(backend: str, rank: int, size: int, limit: timedelta) -> None:
    try:
        host, port = rendezvous_endpoint()
    except ValueError:
        store = _store_by_communicator(limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        return
    host = f"[{host}]" if ":" in host else host
    url = f"tcp://{host}:{port}"
    dist.init_process_group(backend, url, rank=rank, world_size=size, timeout=limit)


def _store_by_communicator(limit: timedelta) -> TCPStore:
    """Return a store at rank 0, which sends its address by a communicator of the package."""
    with init("auto", timeout=limit.total_seconds()) as comm:
        topology = topology_of(comm)
        host = "127.0.0.1" if topology.one_host else topology.locations[0].host
        store, address = None, None
        if comm.rank == 0:
            store = TCPStore(host, 0, None, True, limit, wait_for_workers=False)
            address = (host, store.port)
        host, port = all_gather_object(comm, address)[0]
        return store or TCPStore(host, port, None, False, limit)


@contextmanager
def all_raise() -> Iterator[None]:
    """Raise an error of the block on all ranks if one of them raises it.

    A collective call if torch's default group is initialised and has a backend for the CPU: one
    small gather. The group stays usable.
    """
    gathers = dist.is_initialized() and "cpu:" in dist.get_backend_config()
    group: Gather = all_gather_values if gathers else lambda own: [own]
    with all_or_none(group, "the ranks' arguments", "Give the same on all ranks."):
        yield


def give_up(error: BaseException) -> None:
    """Abort the default group if its backend is "tagi_ddp": ranks that wait then raise the error.

    The group cannot be used after that.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, ProcessGroup):
        abort((group.communicator,), error)


def exact(device: torch.device) -> torch.dtype:
    """Return the dtype in which losses are added up: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sum_of(value: float, device: torch.device) -> float:
    """Return the sum of all ranks' values, computed on a device; a collective call."""
    tensor = torch.tensor([value], dtype=exact(device), device=device)
    dist.all_reduce(tensor)
    return tensor.item()


def _leave(made: weakref.ref[dist.ProcessGroup]) -> None:
    """Destroy the default group if it is still the one that was made here."""
    if dist.is_initialized() and dist.group.WORLD is made():
        dist.destroy_process_group()


# --- nodes -----------------------------------------------------------------------------------

Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]

# Groups cost connections, so each division of a default group into nodes is made once.
_pairs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int | None, Pair | None]] = (
    weakref.WeakKeyDictionary()
)


def node_groups(node_size: int | None) -> Pair | None:
    """Return the group of this rank's node and that of its peers on all nodes; collective.

    Args:
        node_size: the number of consecutive ranks of a node; None: see `Topology.nodes`.

    Returns:
        None if every rank is a node.

    Raises:
        ValueError: nodes differ in their numbers of ranks, or ``node_size`` does not fit.
    """
    known = _pairs.setdefault(world(), {})
    if node_size not in known:
        known[node_size] = _make_pair(_nodes(node_size))
    return known[node_size]


def _nodes(node_size: int | None) -> list[list[int]]:
    own = Location.of_this_process(dist.get_world_size())
    locations = [Location.of(values) for values in all_gather_values(astuple(own))]
    try:
        return Topology(tuple(locations)).nodes(node_size)
    except ValueError as error:
        raise ValueError(
            f"{error}; or set sharding_strategy to FULL_SHARD, which knows no nodes"
        ) from None


def _make_pair(nodes: list[list[int]]) -> Pair | None:
    if len(nodes[0]) == 1:
        return None
    peers = [list(ranks) for ranks in zip(*nodes, strict=True)]
    node = world() if len(nodes) == 1 else dist.new_subgroups_by_enumeration(nodes)[0]
    return node, dist.new_subgroups_by_enumeration(peers)[0]
