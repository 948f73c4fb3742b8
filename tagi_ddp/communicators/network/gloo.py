"""Gloo's collectives and messages over TCP, by a process group of torch.distributed.

GLOO_SOCKET_IFNAME, a list of network interfaces, overrides the choice among this host's addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tagi_ddp.communicators.buffers import cut
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.control.mesh import chosen_interfaces
from tagi_ddp.communicators.operations import Call, OperationQueue, Ready

if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
    raise ImportError("this torch was built without gloo")

from torch._C import _distributed_c10d as c10d

_ADDRESS = 30.0  # seconds in which the addresses of all ranks must arrive
_STUCK = 1.0  # seconds after which a thread that still waits on cut connections is abandoned
_MORE = 60.0  # seconds that gloo waits longer than its caller, which names the late ranks
_MESSAGE, _UNUSED = 0, 1  # tags
_NOTHING = np.empty((0, 0), np.uint8)
# A gather that padding would lengthen by more than this factor is done by broadcasts.
_PADDED = 1.25
_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class GlooLibrary:
    """Gloo's connections between the ranks of a control channel, made on first use."""

    concurrent = True
    few = 0
    reducible = ("float32", "float64", "int8", "uint8", "int32", "int64")

    def __init__(self, channel: ControlChannel, call: Call) -> None:
        """Listen for the other ranks, which make the same ``call``."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in its stub
        options._threads = 2
        options._devices = _devices(channel.address)
        options._timeout = timedelta(seconds=call.left())
        self._store: Any = _ChannelStore(channel)
        self._rank, self._size = channel.rank, len(channel.hosts)
        self._group: Any = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        self._used = self._cut = False
        # Waits for messages end early only by cutting connections, so threads wait.
        self._messages = {key: OperationQueue(f"tagi_ddp gloo {key}") for key in ("in", "out")}
        _groups.add(self)

    def compare(
        self, handshake: Handshake, data: np.ndarray | None = None
    ) -> tuple[Ready | None, np.ndarray]:
        return None, _NOTHING

    def all_reduce(self, array: np.ndarray, op: ReduceOp, limit: float) -> Ready:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._begin(self._group.allreduce, limit, [_tensor(array)], options)

    def broadcast(self, array: np.ndarray, root: int, limit: float) -> Ready:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._begin(self._group.broadcast, limit, [_bytes(array)], options)

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Ready:
        most = max(counts)
        if most * self._size > _PADDED * out.size:
            parts = cut(out, counts)
            parts[self._rank][...] = array
            works = [
                self.broadcast(part, root, limit) for root, part in enumerate(parts) if part.size
            ]
            return lambda seconds: all(ready(seconds) for ready in works)
        padded, whole = array, out
        if most * self._size > out.size:
            padded = np.concatenate([array, np.zeros(most - array.size, array.dtype)])
            whole = np.empty(most * self._size, out.dtype)
        options = c10d.AllgatherOptions()
        gather = self._group._allgather_base
        ready = self._begin(gather, limit, _bytes(whole), _bytes(padded), options)

        def unpad(seconds: float) -> bool:
            if not ready(seconds):
                return False
            if whole is not out:
                rows = whole.reshape(self._size, most)
                for part, row in zip(cut(out, counts), rows, strict=True):
                    part[...] = row[: part.size]
            return True

        return unpad

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        most: int,
        limit: float,
    ) -> Ready:
        size = array.itemsize
        lengths = [size * count for count in received], [size * count for count in sent]
        options = c10d.AllToAllOptions()
        exchange = self._group.alltoall_base
        return self._begin(exchange, limit, _bytes(out), _bytes(array), *lengths, options)

    def send(self, array: np.ndarray, dst: int, limit: float) -> Ready:
        return self._message("out", self._group.send, array, dst, limit)

    def recv(self, array: np.ndarray, src: int, limit: float) -> Ready:
        return self._message("in", self._group.recv, array, src, limit)

    def part(self, ranks: list[int], channel: ControlChannel, call: Call) -> GlooLibrary:
        return GlooLibrary(channel, call)

    def _begin(self, operation: Callable[..., Any], limit: float, *arguments: Any) -> Ready:
        """Begin a collective, whose last argument holds its options."""
        self._require()
        arguments[-1].timeout = timedelta(seconds=limit + _MORE)
        work = operation(*arguments)

        def ready(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if not work.is_completed():
                    return False  # The wait has timed out, not the operation.
                work.wait()  # It raises the error of the operation, if it has one.
            return True

        return ready

    def _message(
        self, name: str, operation: Callable[..., Any], array: np.ndarray, other: int, limit: float
    ) -> Ready:
        self._require()
        longer = timedelta(seconds=limit + _MORE)
        return self._messages[name].begin(
            lambda: operation([_bytes(array)], other, _MESSAGE).wait(longer)
        )

    def _require(self) -> None:
        if self._cut:
            raise RuntimeError("this rank's communicator has failed")
        self._used = True

    def close(self, clean: bool) -> None:
        cut = not clean and self._used and self._size > 1
        self._cut = True
        last = [self._group]
        self._group = self._store = None
        # A stuck operation ends by its own limit, for which no other thread waits.
        end = threading.Thread(target=_end, args=(last, self._rank, cut), daemon=True)
        if clean:
            for queue in self._messages.values():
                queue.close()
        end.start()
        end.join(_STUCK)
        if not clean:
            for queue in self._messages.values():
                queue.close(_STUCK)


def _end(last: list[Any], rank: int, cut: bool) -> None:
    """Drop the last reference to a group, whose destructor waits for its threads.

    If ``cut``, their waits end before: a wait that times out cuts the connections of the group.
    """
    if cut:
        nothing, other = _bytes(np.empty(1, np.uint8)), (rank + 1) % last[0].size()
        with contextlib.suppress(RuntimeError):
            last[0].recv([nothing], other, _UNUSED).wait(timedelta(milliseconds=1))
    last.clear()


_groups: weakref.WeakSet[GlooLibrary] = weakref.WeakSet()


def _keep_in_fork() -> None:
    """Keep groups alive in a fork, where their destructors would wait for missing threads."""
    for library in _groups:
        if library._group is None:
            continue
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(library._group))


os.register_at_fork(after_in_child=_keep_in_fork)


class _ChannelStore(c10d.Store):
    """The store that gloo needs to connect, over the control channel."""

    def __init__(self, channel: ControlChannel) -> None:
        super().__init__()
        self._channel = channel

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        with self._channel.sending() as notes:
            notes.keep(key, content)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._channel.notes.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        notes = self._channel.notes
        self._channel.until(
            lambda: (
                all(key in notes.values for key in keys)
                or bool(notes.failures or notes.died or notes.closed)
            ),
            time.monotonic() + (_ADDRESS if timeout is None else timeout.total_seconds()),
        )
        if missing := [key for key in keys if key not in notes.values]:
            raise RuntimeError(f"no address arrived for {missing}")


def _devices(address: str) -> Sequence[Any]:
    chosen = chosen_interfaces()
    create_device = partial(dist.ProcessGroupGloo.create_device, lazy_init=True)
    if chosen:
        return [create_device(interface=name) for name in chosen]
    return [create_device(hostname=address)]


def _bytes(array: np.ndarray) -> torch.Tensor:
    return _tensor(array.view(np.uint8))


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Return the array's memory as a tensor, which must not be written to if it is read-only."""
    if not array.flags.writeable:
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        array = np.ctypeslib.as_array(memory).view(array.dtype)
    return torch.from_numpy(array)
