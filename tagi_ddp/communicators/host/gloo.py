"""Ranks on any hosts over TCP, by gloo; torch's default process group stays alone."""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.control.checked import open_channel, opened
from tagi_ddp.communicators.control.mesh import chosen_interfaces
from tagi_ddp.communicators.errors import BackendUnavailable, PeerLost, Timeout, timeout_text
from tagi_ddp.communicators.host.checked_host import CheckedHostCommunicator
from tagi_ddp.communicators.host.gloo_engine import GlooEngine
from tagi_ddp.environment import job_secret, rendezvous_endpoint

_STORE_SLICE = 0.01  # seconds between two looks at the store
# What names a job on all of its hosts alike.
_JOB_NAMES = ("TAGI_DDP_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID")


class GlooCommunicator(CheckedHostCommunicator):
    """A rank whose data go over gloo contexts of its own."""

    backend = "gloo"

    def open_engines(self, call: Call) -> None:
        """Connect this rank's contexts; ``call`` is what their errors name."""
        self.open_ways(call, partial(GlooEngine, self._channel))

    def _engine_split(
        self, call: Call, color: int | None, key: int, part: GlooCommunicator | None
    ) -> None:
        if part is not None:
            part.open_engines(Call("init", "", call.left(), deadline=call.deadline))


def create(rank: int, world_size: int, job: str | None, timeout: float) -> GlooCommunicator:
    """Return this rank's communicator; ranks find each other at `rendezvous_endpoint`.

    torchrun's agent listens there, or else rank 0 does, beside a default process group if there is
    one. Raises BackendUnavailable when the variables are not set.
    """
    _check_interfaces()
    deadline = time.monotonic() + timeout
    store = _environment_store(rank, deadline)
    named = (os.environ[name] for name in _JOB_NAMES if name in os.environ)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{job or next(named, '')}/{attempt}".encode()
    keys = PrefixStore(f"tagi_ddp/{hmac.digest(job_secret(), name, 'sha256').hex()}", store)
    comm = _connect(rank, world_size, keys, timeout, deadline)
    # All ranks are through with the store, and wait in `open_engines` until rank 0 has closed it:
    # neither the next call nor torch's own groups at this address find these keys.
    del keys, store
    return opened(comm, comm.open_engines, timeout, deadline)


def wrap(group: dist.ProcessGroup, timeout: float = DEFAULT_TIMEOUT) -> GlooCommunicator:
    """Return a communicator of the ranks of ``group``, with connections of its own."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return connect(store, group.rank(), group.size(), timeout)


def connect(store: Store, rank: int, size: int, timeout: float) -> GlooCommunicator:
    """Return a communicator of the ranks that have ``store`` in common."""
    _check_interfaces()
    deadline = time.monotonic() + timeout
    comm = _connect(rank, size, store, timeout, deadline)
    return opened(comm, comm.open_engines, timeout, deadline)


def _connect(
    rank: int, size: int, store: Store, timeout: float, deadline: float
) -> GlooCommunicator:
    secret = job_secret()
    if not secret and rank == 0:
        _warn_of_strangers()

    def signature(name: str, record: str) -> str:
        return hmac.digest(secret, f"{name} {record}".encode(), "sha256").hex()

    def write(name: str, text: str) -> None:
        store.set(name, f"{signature(name, text)} {text}")

    def read(name: str) -> str | None:
        """Return what the rank wrote that has the secret, whatever others put there meanwhile."""
        if not store.check([name]):
            return None
        signed, _, record = store.get(name).decode(errors="replace").partition(" ")
        return record if hmac.compare_digest(signed, signature(name, record)) else None

    def exchange(record: bytes) -> Sequence[bytes]:
        try:
            return meet(record)
        except dist.DistError as error:
            what = f"the store at which the ranks meet is gone, with rank 0 it may be: {error}"
            raise PeerLost(f"init on rank {rank} of {size} (gloo): {what}", [0]) from error

    def meet(record: bytes) -> Sequence[bytes]:
        # Each rank counts its own exchanges, which come in the same order on all ranks.
        order = store.add(f"tagi_ddp/{rank}", 1)
        names = [f"tagi_ddp/{order}/{r}" for r in range(size)]
        every = f"tagi_ddp/{order}/all"
        write(names[rank], record.decode())
        # Rank 0 alone reads those of all, or a thousand ranks would ask a million times.
        wanted = names if rank == 0 else [every]
        found: dict[str, str] = {}
        while True:
            for name in wanted:
                if name not in found and (text := read(name)) is not None:
                    found[name] = text
            if len(found) == len(wanted):
                break
            if time.monotonic() > deadline:
                raise missing(names, [r for r in range(size) if read(names[r]) is None] or [0])
            time.sleep(_STORE_SLICE)
        if rank == 0:
            found[every] = json.dumps([found[name] for name in names])
            write(every, found[every])
        records: list[str] = json.loads(found[every])
        return [text.encode() for text in records]

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


def _check_interfaces() -> None:
    """Raise BackendUnavailable when GLOO_SOCKET_IFNAME lists what this host does not have."""
    here = [name for _, name in socket.if_nameindex()]
    chosen = chosen_interfaces()
    if not set(chosen) <= set(here):
        raise BackendUnavailable(
            f"GLOO_SOCKET_IFNAME is {','.join(chosen)}, but this host's network interfaces are "
            f"{', '.join(here)}: name some of these, or unset it"
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
    nobody = (
        f"init on rank {rank} (gloo): no store at {address}, port {port} "
        "(MASTER_ADDR, MASTER_PORT), where rank 0 should listen"
    )
    blamed = [0] if rank else []
    if not hosts and not _await_listener(address, port, deadline):
        raise Timeout(nobody, blamed)  # a TCPStore would try for another second
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
        raise Timeout(f"{nobody}: {error}", blamed) from error


def _loopback_port(address: str, port: int) -> int | None:
    """Return a socket for a store that only this host's ranks look for; the store closes it.

    None where ranks of other hosts may come, and where this process has a store there already.
    """
    if address in ("127.0.0.1", "localhost"):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port), backlog=4096).detach()
    return None


def _await_listener(address: str, port: int, deadline: float) -> bool:
    """Return True when a store listens there, False at the deadline.

    A TCPStore that comes too early tries again after a third of a second or more.
    """
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), left).close()
        except OSError:
            time.sleep(_STORE_SLICE)
        else:
            return True
    return False
