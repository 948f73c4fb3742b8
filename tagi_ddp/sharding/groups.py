"""Groups of ranks, as a communicator, a torch process group, or this process alone."""

from __future__ import annotations

import warnings
import weakref

import torch
from torch.distributed import ProcessGroup

from tagi_ddp.communicators import (
    BackendUnavailable,
    Communicator,
    all_gather_object,
    as_communicator,
)

Group = Communicator | ProcessGroup | None

_kinds: set[type] = set()  # Types that are known to be communicators.

# The communicators of a process group, for each kind of device; made at their first use.
_wrapped: weakref.WeakKeyDictionary[ProcessGroup, dict[str, Communicator]] = (
    weakref.WeakKeyDictionary()
)


def rank_and_size(group: Group) -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) for None."""
    if group is None:
        return 0, 1
    if isinstance(group, ProcessGroup):
        return group.rank(), group.size()
    if isinstance(group, int):  # torch returns an int to processes that are not in a new group.
        raise ValueError("this process is not in the group: only its ranks may call this")
    comm = _own(group)
    return comm.rank, comm.size


def communicator(group: Group, device: torch.device) -> Communicator:
    """Return the group's communicator for tensors on ``device``.

    The first call for a process group and a kind of device connects its ranks: all must call it.
    """
    if not isinstance(group, ProcessGroup):
        return _own(group)
    known = _wrapped.get(group)
    if known is None:
        known = _wrapped[group] = {"cpu": as_communicator(group)}
        # At the process's end it closes itself, and sends an error to the other ranks.
        weakref.finalize(group, _close, known).atexit = False
    if device.type != "cpu" and str(device) not in known:
        known[str(device)] = _on_device(known["cpu"], device)
    return known[str(device) if device.type != "cpu" else "cpu"]


def _own(comm: Communicator | None) -> Communicator:
    """Return ``comm``; raise TypeError if it is not a communicator."""
    # Comparing with the protocol takes longer than a small operation.
    if comm is not None and (type(comm) in _kinds or isinstance(comm, Communicator)):
        _kinds.add(type(comm))
        return comm
    raise TypeError(
        "mgroup must be a communicator or a torch.distributed.ProcessGroup, got "
        f"{type(comm).__name__}; as_communicator() wraps one of mpi4py"
    )


def _on_device(host: Communicator, device: torch.device) -> Communicator:
    from tagi_ddp.communicators import nccl

    try:
        return nccl.create(
            host.rank,
            host.size,
            (device.index, 0),  # The local rank would only choose a device.
            host.timeout,
            lambda own: all_gather_object(host, own),
        )
    except BackendUnavailable as error:  # All ranks raise it.
        warnings.warn(f"tensors are sent through the host: {error}", RuntimeWarning, stacklevel=2)
        return host


def _close(communicators: dict[str, Communicator]) -> None:
    for comm in reversed(communicators.values()):
        comm.close()
