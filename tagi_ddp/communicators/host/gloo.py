"""Ranks on any hosts over TCP, by torch.distributed's gloo; the default process group stays alone.

GLOO_SOCKET_IFNAME, a list of network interfaces, overrules the choice among this host's addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import os
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tagi_ddp.communicators.buffers import HostElements
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.control.channel import ControlChannel, Series
from tagi_ddp.communicators.control.checked import open_channel, opened
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.errors import BackendUnavailable, Timeout, timeout_text
from tagi_ddp.communicators.host.checked_host import CheckedHostCommunicator
from tagi_ddp.environment import job_secret, rendezvous_endpoint

if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
    raise ImportError("this torch was built without gloo")

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_STORE_SLICE = 0.01  # seconds between two looks at the store
# What names a job on all of its hosts alike.
_JOB_NAMES = ("TAGI_DDP_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID")


class GlooCommunicator(CheckedHostCommunicator):
    """A rank of a gloo context of its own."""

    backend = "gloo"

    def __init__(self, rank: int, size: int, timeout: float, channel: ControlChannel) -> None:
        """Make rank ``rank`` of ``size``; `open_engine` comes next."""
        super().__init__(rank, size, timeout, channel)
        self._group: Any = None
        self._held: list[tuple[Any, list[torch.Tensor]]] = []  # operations, and their memory

    def open_engine(self, call: Call) -> None:
        """Connect the contexts of all ranks; ``call`` is what their errors name."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub has none
        options._devices = _devices(self._channel.own_address())
        options._timeout = timedelta(seconds=call.left())
        options._threads = 2
        handshake = self._handshake(call, series=(Series.SETUP, Series.SETUP))
        with handshake.explaining():
            store = _ChannelStore(self._channel, call.deadline)
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        handshake.gather(None)
        handshake.leave()

    def _engine_broadcast(self, array: np.ndarray, root: int, limit: float) -> Ready:
        works = [self._broadcast_async(array, root, limit)] if array.size else []
        return partial(_complete, works)

    def _broadcast_async(self, array: np.ndarray, root: int, limit: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = timedelta(seconds=limit)
        memory = [_bytes(array)]
        return self._hold(self._group.broadcast(memory, options), memory)

    def _engine_all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Ready:
        # A broadcast from each rank: gloo's own all_gather takes equal counts only.
        ends = np.cumsum(counts)
        slices = [out[end - count : end] for count, end in zip(counts, ends, strict=True)]
        slices[self.rank][...] = array
        works = [
            self._broadcast_async(part, root, limit)
            for root, part in enumerate(slices)
            if part.size
        ]
        return partial(_complete, works)

    def _engine_all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        limit: float,
    ) -> Ready:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=limit)
        width, memory = array.itemsize, [_bytes(out), _bytes(array)]
        work = self._group.alltoall_base(
            *memory,
            [width * count for count in received],
            [width * count for count in sent],
            options,
        )
        return partial(_complete, [self._hold(work, memory)])

    def _engine_send(
        self, handshake: Handshake, data: HostElements, dst: int, limit: float
    ) -> None:
        memory = [_bytes(data.array)]
        work = self._hold(self._group.send(memory, dst, 0), memory)
        handshake.carry(partial(_deliver, work, limit))

    def _engine_recv(
        self, handshake: Handshake, data: HostElements, src: int, limit: float
    ) -> None:
        memory = [_bytes(data.array)]
        work = self._hold(self._group.recv(memory, src, 0), memory)
        handshake.carry(partial(_deliver, work, limit))

    def _engine_split(
        self, call: Call, color: int | None, key: int, part: GlooCommunicator | None
    ) -> None:
        if part is not None:
            part.open_engine(Call("init", "", call.left(), deadline=call.deadline))

    def _hold(self, work: Any, memory: list[torch.Tensor]) -> Any:
        """Remember what gloo's threads use, until they are done with it; return ``work``."""
        with self._lock:  # messages out have a thread of their own
            self._held = [entry for entry in self._held if not entry[0].is_completed()]
            self._held.append((work, memory))
        return work

    def _engine_close(self, clean: bool) -> None:
        if not clean and self._group is not None:
            # Its destructor waits for operations that are stuck: leave it to the process's end. A
            # thread of it that lets go of an array's memory then, without Python, would abort.
            for kept in (self._group, self._held):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._group, self._held = None, []


class _ChannelStore(Store):
    """What gloo asks of a store while it connects, by messages."""

    def __init__(self, channel: ControlChannel, deadline: float) -> None:
        super().__init__()
        self._channel = channel
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        self._channel.send_value(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._channel.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        channel = self._channel
        channel.until(
            lambda: (
                all(key in channel.values for key in keys)
                or bool(channel.failures or channel.died or channel.closed)
            ),
            self._deadline,
        )
        if missing := [key for key in keys if key not in channel.values]:
            raise RuntimeError(f"no address came for {missing}")


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


def create(rank: int, world_size: int, job: str | None, timeout: float) -> GlooCommunicator:
    """Return this rank's communicator; ranks find each other at `rendezvous_endpoint`.

    torchrun's agent listens there, or else rank 0 does, beside a default process group if there is
    one. Raises BackendUnavailable when the variables are not set.
    """
    deadline = time.monotonic() + timeout
    store = _environment_store(rank, deadline)
    named = (os.environ[name] for name in _JOB_NAMES if name in os.environ)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{job or next(named, '')}/{attempt}".encode()
    keys = PrefixStore(f"tagi_ddp/{hmac.digest(job_secret(), name, 'sha256').hex()}", store)
    comm = _connect(rank, world_size, keys, timeout, deadline)
    # All ranks are through with the store, and wait in `open_engine` until rank 0 has closed it:
    # neither the next call nor torch's own groups at this address find these keys.
    del keys, store
    return opened(comm, comm.open_engine, timeout, deadline)


def wrap(group: dist.ProcessGroup, timeout: float = 300.0) -> GlooCommunicator:
    """Return a communicator of the ranks of ``group``, with connections of its own."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return connect(store, group.rank(), group.size(), timeout)


def connect(store: Store, rank: int, size: int, timeout: float) -> GlooCommunicator:
    """Return a communicator of the ranks that have ``store`` in common."""
    deadline = time.monotonic() + timeout
    comm = _connect(rank, size, store, timeout, deadline)
    return opened(comm, comm.open_engine, timeout, deadline)


def _connect(
    rank: int, size: int, store: Store, timeout: float, deadline: float
) -> GlooCommunicator:
    secret = job_secret()
    if not secret and rank == 0:
        _warn_of_strangers()

    def signature(name: str, record: str) -> str:
        return hmac.digest(secret, f"{name} {record}".encode(), "sha256").hex()

    def read(name: str) -> str | None:
        """Return what the rank wrote that has the secret, whatever others put there meanwhile."""
        if not store.check([name]):
            return None
        signed, _, record = store.get(name).decode(errors="replace").partition(" ")
        return record if hmac.compare_digest(signed, signature(name, record)) else None

    def exchange(record: bytes) -> Sequence[bytes]:
        # Each rank counts its own exchanges, which come in the same order on all ranks.
        order = store.add(f"tagi_ddp/{rank}", 1)
        names = [f"tagi_ddp/{order}/{r}" for r in range(size)]
        store.set(names[rank], f"{signature(names[rank], record.decode())} {record.decode()}")
        records: dict[int, str] = {}
        while True:
            for r in set(range(size)) - records.keys():
                if (found := read(names[r])) is not None:
                    records[r] = found
            if len(records) == size:
                return [records[r].encode() for r in range(size)]
            if time.monotonic() > deadline:
                raise missing(names, sorted(set(range(size)) - records.keys()))
            time.sleep(_STORE_SLICE)

    def missing(names: list[str], ranks: list[int]) -> Timeout:
        what = timeout_text(ranks, timeout)
        if strangers := [r for r in ranks if store.check([names[r]])]:
            what += (
                f" What stands there for rank {strangers[0]} is not signed with this job's secret: "
                "give all ranks the same TAGI_DDP_SECRET or TAGI_DDP_SECRET_FILE."
            )
        return Timeout(f"init on rank {rank} of {size} (gloo): {what}", ranks)

    channel = open_channel(
        GlooCommunicator.backend, rank, size, timeout, deadline, exchange, secret
    )
    return GlooCommunicator(rank, size, timeout, channel)


@functools.cache  # once for all communicators of a process
def _warn_of_strangers() -> None:
    warnings.warn(
        "this job has no secret: whoever reaches the port at which its ranks meet can join or "
        "disturb it. On a machine or network that you share with others, set TAGI_DDP_SECRET on "
        "all ranks, or TAGI_DDP_SECRET_FILE to the name of a file of mode 0600 (docs/security.md)",
        RuntimeWarning,
        stacklevel=2,
    )


def _environment_store(rank: int, deadline: float) -> Store:
    """Return the store by which the ranks find each other."""
    try:
        address, port = rendezvous_endpoint()
    except ValueError as error:
        raise BackendUnavailable(
            "gloo's ranks find each other at rank 0's host: start them with torchrun or tagi-ddp "
            "run, or set MASTER_ADDR to its name and MASTER_PORT to a free port on all ranks "
            f"({error})"
        ) from error
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await_listener(address, port, deadline)
    limit = timedelta(seconds=max(0.01, deadline - time.monotonic()))
    try:
        return TCPStore(
            address,
            port,
            None,
            hosts,
            limit,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_loopback_port(address, port) if hosts else None,
        )
    except RuntimeError as error:
        raise Timeout(
            f"init on rank {rank} (gloo): no store at {address}, port {port} "
            f"(MASTER_ADDR, MASTER_PORT), where rank 0 should listen: {error}",
            [0] if rank else [],
        ) from error


def _loopback_port(address: str, port: int) -> int | None:
    """Return a socket for a store that only this host's ranks look for; the store closes it.

    None where ranks of other hosts may come, and where this process has a store there already.
    """
    if address in ("127.0.0.1", "localhost"):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port), backlog=4096).detach()
    return None


def _await_listener(address: str, port: int, deadline: float) -> None:
    """Return when a store listens there, or at the deadline.

    A TCPStore that comes too early tries again after a third of a second or more.
    """
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), left).close()
        except OSError:
            time.sleep(_STORE_SLICE)
        else:
            return


def _devices(address: str) -> list[Any]:
    chosen = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create_device = dist.ProcessGroupGloo.create_device
    if chosen:
        return [create_device(interface=name) for name in chosen]
    return [create_device(hostname=address)]


def _bytes(array: np.ndarray) -> torch.Tensor:
    """Return the array's memory as a tensor; a read-only one is only read from."""
    flat = array.view(np.uint8)
    if not flat.flags.writeable:
        memory = (ctypes.c_uint8 * flat.size).from_address(flat.ctypes.data)
        flat = np.ctypeslib.as_array(memory)
    return torch.from_numpy(flat)
