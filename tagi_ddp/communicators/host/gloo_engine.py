"""What moves data over TCP: contexts of torch.distributed's gloo.

GLOO_SOCKET_IFNAME, a list of network interfaces, overrules the choice among this host's addresses.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Ready

if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
    raise ImportError("this torch was built without gloo")

from torch._C._distributed_c10d import Store

_ADDRESS = 30.0  # seconds in which what all ranks said when they made the engine must come
_COPIES = 1 << 23  # bytes up to which a rank sends each other one a copy of what all are to have


class GlooEngine:
    """Gloo contexts of ``ranks`` of a channel; all of them make it at once, under one ``name``.

    gloo's ranks wait for each other's leave to send, which comes behind what is under way: on one
    connection, large messages take turns. So there are two, for messages up, to higher ranks, and
    for messages down.
    """

    chunks = 2

    def __init__(self, channel: ControlChannel, name: str, ranks: list[int], call: Call) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub has none
        options._threads = 2
        self._rank = ranks.index(channel.rank)
        self._groups: list[Any] = []
        # They connect two ranks when these first have something to tell each other.
        self._stores = [_ChannelStore(channel, f"{name} {way} ") for way in ("up", "down")]
        for store in self._stores:
            options._devices = _devices(channel.address)
            options._timeout = timedelta(seconds=call.left())
            group: Any = dist.ProcessGroupGloo(store, self._rank, len(ranks), options)
            self._groups.append(group)
        self._lock = threading.Lock()
        self._held: list[tuple[Any, list[torch.Tensor]]] = []  # operations, and their memory

    def all_reduce(self, array: np.ndarray, op: ReduceOp, limit: float) -> Ready:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        options.timeout = timedelta(seconds=limit)
        numbers = _as_numbers(array, op)
        memory = [torch.from_numpy(numbers)]
        works = [self._hold(self._groups[0].allreduce(memory, options), memory)]

        def ready(seconds: float) -> bool:
            if not _complete(works, seconds):
                return False
            if numbers is not array:
                _take_numbers(numbers, array, op)
            return True

        return ready if array.size else _at_once

    def broadcast(self, array: np.ndarray, root: int, limit: float) -> Ready:
        works = [self._broadcast_async(array, root, limit)] if array.size else []
        return partial(_complete, works)

    def _broadcast_async(self, array: np.ndarray, root: int, limit: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = timedelta(seconds=limit)
        memory = [_bytes(array)]
        return self._hold(self._groups[root % 2].broadcast(memory, options), memory)

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Ready:
        # gloo's own all_gather takes equal counts only.
        ranks = len(counts)
        if max(counts) * ranks * array.itemsize <= _COPIES:
            copies = np.tile(array, ranks)
            return self.all_to_all(copies, out, [array.size] * ranks, counts, limit)
        ends = np.cumsum(counts)
        slices = [out[end - count : end] for count, end in zip(counts, ends, strict=True)]
        slices[self._rank][...] = array
        works = [
            self._broadcast_async(part, root, limit)
            for root, part in enumerate(slices)
            if part.size
        ]
        return partial(_complete, works)

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        limit: float,
    ) -> Ready:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=limit)
        rank, ranks = self._rank, len(sent)
        works = []
        for way, group in enumerate(self._groups):
            # To this rank itself: up.
            goes = [(other < rank) == way for other in range(ranks)]
            comes = [(other > rank) == way for other in range(ranks)]
            memory = [
                _bytes(_part(out, received, comes)),
                _bytes(_part(array, sent, goes)),
            ]
            sizes = [
                [array.itemsize * count * part for count, part in zip(counts, parts, strict=True)]
                for counts, parts in ((received, comes), (sent, goes))
            ]
            works.append(self._hold(group.alltoall_base(*memory, *sizes, options), memory))
        return partial(_complete, works)

    def send(self, array: np.ndarray, dst: int, limit: float) -> Ready:
        memory = [_bytes(array)]
        return partial(_deliver, self._hold(self._groups[0].send(memory, dst, 0), memory), limit)

    def recv(self, array: np.ndarray, src: int, limit: float) -> Ready:
        memory = [_bytes(array)]
        return partial(_deliver, self._hold(self._groups[0].recv(memory, src, 0), memory), limit)

    def _hold(self, work: Any, memory: list[torch.Tensor]) -> Any:
        """Remember what gloo's threads use, until they are done with it; return ``work``."""
        with self._lock:  # messages out have a thread of their own
            self._held = [entry for entry in self._held if not entry[0].is_completed()]
            self._held.append((work, memory))
        return work

    def close(self, clean: bool) -> None:
        if not clean and not all(work.is_completed() for work, _ in self._held):
            # Its destructor waits for operations that are stuck: leave it to the process's end. A
            # thread of it that lets go of an array's memory then, without Python, would abort.
            for kept in (self._groups, self._stores, self._held):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._groups, self._stores, self._held = [], [], []


class _ChannelStore(Store):
    """What gloo asks of a store while it connects, by messages."""

    def __init__(self, channel: ControlChannel, name: str) -> None:
        super().__init__()
        self._channel = channel
        self._name = name

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        with self._channel.telling() as notes:
            notes.keep(self._name + key, content)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._channel.notes.values[self._name + key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        notes, keys = self._channel.notes, [self._name + key for key in keys]
        self._channel.until(
            lambda: (
                all(key in notes.values for key in keys)
                or bool(notes.failures or notes.died or notes.closed)
            ),
            time.monotonic() + (_ADDRESS if timeout is None else timeout.total_seconds()),
        )
        if missing := [key for key in keys if key not in notes.values]:
            raise RuntimeError(f"no address came for {missing}")


def _at_once(seconds: float) -> bool:
    return True


def _part(array: np.ndarray, counts: list[int], chosen: list[bool]) -> np.ndarray:
    """Return the parts that are chosen, which lie together."""
    ends = np.cumsum([0, *counts])
    begins = [int(ends[i]) for i, part in enumerate(chosen) if part] or [0]
    return array[
        begins[0] : begins[0] + sum(c for c, part in zip(counts, chosen, strict=True) if part)
    ]


# What gloo can add up and compare, as torch names it; and where other integers are as large.
_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_WIDER = {"int16": np.int32, "uint16": np.int32, "uint32": np.int64}
_SIGN = np.uint64(1 << 63)


def _as_numbers(array: np.ndarray, op: ReduceOp) -> np.ndarray:
    """Return what gloo can reduce: the array itself, or its values as another type."""
    if array.dtype == np.uint64:  # which order as signed ones do once the highest bit is turned
        return array.view(np.int64) if op == "sum" else (array ^ _SIGN).view(np.int64)
    wider = _WIDER.get(array.dtype.name)
    return array if wider is None else array.astype(wider)


def _take_numbers(numbers: np.ndarray, array: np.ndarray, op: ReduceOp) -> None:
    """Write back what `_as_numbers` has returned."""
    if array.dtype != np.uint64:
        array[...] = numbers.astype(array.dtype)
    elif op != "sum":
        array[...] = numbers.view(np.uint64) ^ _SIGN


def _complete(works: list[Any], seconds: float) -> bool:
    """Wait up to ``seconds`` for each operation that gloo runs on its threads."""
    while works:
        work = works[0]
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False  # the wait timed out, not the operation
            work.wait(timedelta(seconds=seconds))  # raises the operation's own error
        works.pop(0)
    return True


def _deliver(work: Any, limit: float, _: float) -> bool:
    """Wait for a message; the wait must not end early, as gloo then closes the connection."""
    work.wait(timedelta(seconds=limit))
    return True


def _devices(address: str) -> list[Any]:
    chosen = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create_device = dist.ProcessGroupGloo.create_device
    if chosen:
        return [create_device(interface=name, lazy_init=True) for name in chosen]
    return [create_device(hostname=address, lazy_init=True)]


def _bytes(array: np.ndarray) -> torch.Tensor:
    """Return the array's memory as a tensor; a read-only one is only read from."""
    flat = array.view(np.uint8)
    if not flat.flags.writeable:
        memory = (ctypes.c_uint8 * flat.size).from_address(flat.ctypes.data)
        flat = np.ctypeslib.as_array(memory)
    return torch.from_numpy(flat)
