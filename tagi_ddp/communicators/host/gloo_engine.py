"""What moves data over TCP: contexts of torch.distributed's gloo.

GLOO_SOCKET_IFNAME, a list of network interfaces, overrules the choice among this host's addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.control.mesh import chosen_interfaces
from tagi_ddp.communicators.host import messages
from tagi_ddp.communicators.operation_queue import OperationQueue

if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
    raise ImportError("this torch was built without gloo")

from torch._C._distributed_c10d import Store

_ADDRESS = 30.0  # seconds in which what all ranks said when they made the engine must come
_STUCK = 1.0  # seconds after which a thread that waits though connections were cut is left alone
Wait = Callable[[], Any]
"""Returns when a message is complete; raises RuntimeError when it will not be."""

_QUEUES = "even collectives", "odd collectives", "in", "out"
# Tags: of messages from rank to rank; above those of collectives.
_MESSAGE, _UNUSED = 0, (1 << 31) - 1


class GlooEngine:
    """Gloo contexts of ``ranks`` of a channel; all of them make it at once, under one ``name``.

    gloo's ranks wait for each other's leave to send, which comes behind what is under way: on one
    connection, large messages take turns. So there are two, for messages up, to higher ranks, and
    for messages down. gloo's own collectives are slower than those of its messages.
    """

    chunks = 2
    sums_meet = True
    quick = False

    def __init__(self, channel: ControlChannel, name: str, ranks: list[int], call: Call) -> None:
        self.rank = ranks.index(channel.rank)
        self.size = len(ranks)
        self.connected: set[tuple[int, int]] = set()  # from a rank to another
        self.up, self.down = (
            _Context(channel, f"{name} {way} ", self.rank, self.size, call)
            for way in ("up", "down")
        )
        self._lock = threading.Lock()
        self._collectives = 0  # begun so far
        # Threads wait for the messages: no wait of gloo's ends early without cutting connections.
        self._queues = {name: OperationQueue(f"tagi_ddp.gloo.{name}") for name in _QUEUES}

    def prepare_sums(self, handshake: Handshake, lanes: int) -> None:
        handshake.carry(self._collective(handshake, messages.connect))

    def all_reduce(self, array: np.ndarray, op: ReduceOp, handshake: Handshake) -> Ready:
        return self._collective(handshake, messages.all_reduce, array, op)

    def broadcast(self, array: np.ndarray, root: int, handshake: Handshake) -> Ready:
        return self._collective(handshake, messages.broadcast, array, root)

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], handshake: Handshake
    ) -> Ready:
        return self._collective(handshake, messages.all_gather, array, out, counts)

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        handshake: Handshake,
    ) -> Ready:
        return self._collective(handshake, messages.all_to_all, array, out, sent, received)

    def send(self, array: np.ndarray, dst: int, handshake: Handshake) -> Ready:
        return self._begin("out", _MESSAGE, handshake, lambda gloo: iter([gloo.send(array, dst)]))

    def recv(self, array: np.ndarray, src: int, handshake: Handshake) -> Ready:
        return self._begin("in", _MESSAGE, handshake, lambda gloo: iter([gloo.recv(array, src)]))

    def _collective(
        self, handshake: Handshake, operation: Callable[..., Iterator[Wait]], *arguments: Any
    ) -> Ready:
        # What two ranks send each other under the tags of different calls never arrives.
        self._collectives += 1
        tag = handshake.tag(self._collectives, _UNUSED - 1)
        queue = _QUEUES[self._collectives % 2]
        return self._begin(queue, tag, handshake, lambda gloo: operation(gloo, *arguments))

    def _begin(
        self,
        queue: str,
        tag: int,
        handshake: Handshake,
        operation: Callable[[_Messages], Iterator[Wait]],
    ) -> Ready:
        gloo = _Messages(self, tag, handshake.left())

        def run() -> None:
            for wait in operation(gloo):
                wait()

        with self._lock:  # messages out have a thread of their own
            ticket = self._queues[queue].ticket(_Early)
            self._queues[queue].start(ticket, run)

        def ready(seconds: float) -> bool:
            try:
                ticket.wait(seconds)
            except _Early:
                return False
            return True

        return ready

    def close(self, clean: bool) -> None:
        contexts = self.up, self.down
        if not clean:
            for context in contexts:
                context.cut()
        for queue in self._queues.values():
            queue.close(None if clean else _STUCK)
        for context in contexts:
            context.free()


class _Messages:
    """The messages of one operation under one ``tag``; each may take ``limit`` seconds."""

    def __init__(self, engine: GlooEngine, tag: int, limit: float) -> None:
        self.rank, self.size = engine.rank, engine.size
        self._engine = engine
        self._tag = tag
        self._limit = timedelta(seconds=limit)

    def connect(self, dst: int, src: int) -> Iterator[Wait]:
        # The first message between two ranks waits until the other one begins it too. So all ranks
        # begin what goes up before what goes down, or they could wait in a circle.
        hello, known = np.zeros(1, np.uint8), self._engine.connected
        waits = []
        for up in (True, False):
            if (dst > self.rank) == up and (self.rank, dst) not in known:
                waits.append(self.send(hello, dst))
            if (src < self.rank) == up and (src, self.rank) not in known:
                waits.append(self.recv(hello.copy(), src))
        yield from waits
        known.update([(self.rank, dst), (src, self.rank)])

    def send(self, array: np.ndarray, dst: int) -> Wait:
        context = self._engine.up if dst > self.rank else self._engine.down
        return self._begin(context, context.group.send, array, dst)

    def recv(self, array: np.ndarray, src: int) -> Wait:
        context = self._engine.up if src < self.rank else self._engine.down
        return self._begin(context, context.group.recv, array, src)

    def _begin(
        self, context: _Context, begin: Callable[..., Any], array: np.ndarray, other: int
    ) -> Wait:
        if array.size == 0:
            return _nothing
        if context.is_cut:
            raise RuntimeError("this rank's communicator has failed")
        work = begin([_bytes(array)], other, self._tag)
        context.connected_to = other
        return partial(work.wait, self._limit)


def _nothing() -> None:
    """Wait for a message that has nothing in it, and is not sent."""


class _Context:
    """A rank's part in a gloo context, which connects two ranks with their first message."""

    def __init__(
        self, channel: ControlChannel, name: str, rank: int, size: int, call: Call
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub has none
        options._threads = 1
        options._devices = _devices(channel.address)
        options._timeout = timedelta(seconds=call.left())
        self._store: Any = _ChannelStore(channel, name)
        self.group: Any = dist.ProcessGroupGloo(self._store, rank, size, options)
        self.connected_to: int | None = None  # one of those, if any
        self.is_cut = False
        _contexts.add(self)

    def cut(self) -> None:
        """Let all that waits fail."""
        self.is_cut = True
        if self.connected_to is not None:  # a wait that times out cuts all connections
            nothing = _bytes(np.empty(1, np.uint8))
            with contextlib.suppress(RuntimeError):
                work = self.group.recv([nothing], self.connected_to, _UNUSED)
                work.wait(timedelta(milliseconds=1))

    def free(self) -> None:
        """Let go of the connections and of gloo's threads."""
        self.is_cut = True
        self.group = self._store = None


_contexts: weakref.WeakSet[_Context] = weakref.WeakSet()


def _keep_in_fork() -> None:
    """Let a fork never free what would wait for threads of gloo, which it does not have."""
    for context in _contexts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.group))


os.register_at_fork(after_in_child=_keep_in_fork)


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


class _Early(Exception):
    """A wait for an operation that is not complete yet."""


def _devices(address: str) -> list[Any]:
    chosen = chosen_interfaces()
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
