"""Groups of ranks, as a communicator, a torch process group, or this process alone; their votes."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch.distributed import ProcessGroup

from tagi_ddp.communicators import (
    BackendUnavailable,
    Communicator,
    all_gather_object,
    as_communicator,
)
from tagi_ddp.communicators.equality import all_or_none

_REMEDY = "Make the same calls in the same order with fitting arguments on all ranks."

Group = Communicator | ProcessGroup | None
T = TypeVar("T")

_kinds: set[type] = set()  # Types that are known to be communicators.

_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.channels_last_3d}

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


@dataclass(frozen=True)
class Vote(Generic[T]):
    """The result of a vote of all ranks.

    ``common`` is the result of ``check``, ``numbers`` those of the ranks' ``number``. ``transit``
    is the memory format of data in transit, ``own`` this rank's; they differ only if the ranks' do.
    """

    common: T
    transit: torch.memory_format
    own: torch.memory_format
    numbers: list[int]


def vote(
    comm: Communicator,
    name: str,
    tensor: torch.Tensor,
    check: Callable[[], T],
    number: Callable[[], int] = int,
) -> Vote[T]:
    """Compare the ranks' calls, and return their vote.

    If ``check`` raises on a rank, or the ranks' calls differ, all ranks raise, before any tensor is
    sent, and the communicator stays usable. This costs one small all-gather.
    """
    problem: Exception | None = None
    call, formats, favourite, own_number = "", 0, 0, 0
    try:
        check_dense(tensor)
        common, own_number = check(), number()
        call = f"{name}({str(tensor.dtype).removeprefix('torch.')}, {tensor.device.type}, {common})"
        formats, favourite = _formats(tensor)
    except Exception as error:  # No error may keep the others waiting for this rank.
        problem = error
    digest = hashlib.blake2b(call.encode(), digest_size=8).digest()
    code = int.from_bytes(digest, "big", signed=True)
    rows = _gather_rows(comm, [int(problem is not None), code, formats, favourite, own_number])
    if any(row[:2] != [0, code] for row in rows):
        with all_or_none(comm, "the ranks' calls", _REMEDY) as same:
            if problem is not None:
                raise problem
            same("call", call)
    shared = functools.reduce(operator.and_, (row[2] for row in rows))
    transit = next((bit for bit in (rows[0][3], 1, 2, 4) if shared & bit), 1)
    own = transit if formats & transit else favourite
    return Vote(common, _FORMATS[transit], _FORMATS[own], [row[4] for row in rows])


def check_dense(tensor: torch.Tensor) -> None:
    """Raise TypeError unless ``tensor`` is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"input_ must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(
            f"input_ must be dense, got a tensor of layout {tensor.layout}: to_dense() makes one"
        )


def _formats(tensor: torch.Tensor) -> tuple[int, int]:
    """Return all formats that the tensor is contiguous in, or will be, and the likeliest, as bits.

    A tensor of a single channel, for example, is contiguous in two; its strides decide.
    """
    bits = sum(bit for bit, f in _FORMATS.items() if tensor.is_contiguous(memory_format=f)) or 1
    usual = bits & 1 and tensor.stride() == _usual_strides(tensor.shape)
    return bits, 1 if usual or bits == 1 else bits & 2 or bits & 4


def _usual_strides(shape: Sequence[int]) -> tuple[int, ...]:
    lengths = [max(length, 1) for length in shape]
    return tuple(math.prod(lengths[i + 1 :]) for i in range(len(lengths)))


def _gather_rows(comm: Communicator, own: list[int]) -> list[list[int]]:
    if comm.device != "cpu":  # Its buffers are on the device; objects do not need them.
        return all_gather_object(comm, own)
    table = np.empty((comm.size, len(own)), np.int64)
    comm.all_gather(np.array(own, np.int64), table)
    rows: list[list[int]] = table.tolist()
    return rows
