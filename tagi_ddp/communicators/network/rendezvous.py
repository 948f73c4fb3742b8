"""Rendezvous of gloo's ranks through records in a store of torch.distributed.

torch's default process group is not used. A call of the store can wait for ever if the listener
does not answer, so all calls run in another thread.
"""

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

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT, Communicator
from tagi_ddp.communicators.control.mesh import chosen_interfaces
from tagi_ddp.communicators.errors import (
    BackendUnavailable,
    CommunicatorError,
    Mismatch,
    PeerLost,
    Timeout,
    timeout_text,
)
from tagi_ddp.communicators.network.connect import connect as connect_ranks
from tagi_ddp.communicators.network.gloo import GlooLibrary
from tagi_ddp.communicators.operations import Call, in_time
from tagi_ddp.environment import job_secret, rendezvous_endpoint, two_levels

_STORE_SLICE = 0.01  # seconds between two reads of the store
_LAST_LOOK = 0.5  # seconds before its limit at which a rank looks who is missing
_MORE = 1.0  # seconds after its limit at which a call of the store counts as stuck
# Variables with the name of a job, equal on all of its hosts.
_JOB_NAMES = ("TAGI_DDP_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID")


def create(rank: int, world_size: int, job: str | None, timeout: float) -> Communicator:
    """Return this rank's communicator; ranks find each other at `rendezvous_endpoint`.

    torchrun's agent listens there, or else rank 0, together with a default process group if there
    is one. Raises BackendUnavailable if the variables are not set.
    """
    _check_interfaces()
    two_levels()  # A wrong value raises before another rank can find a store here.
    call = Call("init", "", timeout, deadline=time.monotonic() + timeout)
    named = (os.environ[name] for name in _JOB_NAMES if name in os.environ)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{job or next(named, '')}/{attempt}".encode()
    prefix = f"tagi_ddp/{hmac.digest(job_secret(), name, 'sha256').hex()}"
    store = _environment_store(rank, call.deadline)
    rendezvous = _Rendezvous(PrefixStore(prefix, store), rank, world_size, call)
    del store  # The rendezvous drops the last reference.
    return rendezvous.connect()


def wrap(group: dist.ProcessGroup, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
    """Return a communicator of the ranks of ``group``, with connections of its own."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return connect(store, group.rank(), group.size(), timeout)


def connect(store: Store, rank: int, size: int, timeout: float) -> Communicator:
    """Return a communicator of the ranks that share ``store``."""
    _check_interfaces()
    call = Call("init", "", timeout, deadline=time.monotonic() + timeout)
    return _Rendezvous(store, rank, size, call).connect()


class _Rendezvous:
    """Rank ``rank`` of ``size`` at a store, whose records are signed with the job's secret."""

    def __init__(self, store: Store, rank: int, size: int, call: Call) -> None:
        self._store: Store | None = store
        self._rank, self._size, self._call = rank, size, call
        self._where = f"init on rank {rank} of {size} (gloo)"
        self._secret = job_secret()
        self._late: Timeout | None = None  # the error of the ranks that were missing near the end

    def connect(self) -> Communicator:
        if not self._secret and self._rank == 0:
            _warn_of_strangers()
        try:
            return connect_ranks(
                "gloo",
                self._rank,
                self._size,
                self._call,
                self._exchange,
                GlooLibrary,
                secret=self._secret,
                release=self._release,
            )
        except Mismatch:
            self._release()  # The frames of the error would keep the store for a while.
            raise

    def _release(self) -> None:
        """Drop the store before any rank returns.

        The next `init` and torch's own groups at its address must not find these keys.
        """
        self._store = None

    def _exchange(self, record: bytes) -> Sequence[bytes]:
        assert self._store is not None
        store, limit = self._store, self._call.left() + _MORE
        what = "the store at which the ranks find each other, perhaps rank 0's, is silent"
        silent = Timeout(f"{self._where}: {what}", [0])
        try:
            return in_time(lambda: self._exchange_in(store, record.decode()), limit, silent)
        except dist.DistError as error:
            if self._late is not None:  # Rank 0 came to its deadline a moment earlier.
                raise self._late from error
            what = f"the store of the ranks' rendezvous is gone, perhaps with rank 0: {error}"
            raise PeerLost(f"{self._where}: {what}", [0]) from error

    def _exchange_in(self, store: Store, record: str) -> Sequence[bytes]:
        # Each rank counts its own exchanges, which have the same order on all ranks.
        order = store.add(f"tagi_ddp/{self._rank}", 1)
        names = [f"tagi_ddp/{order}/{r}" for r in range(self._size)]
        every = f"tagi_ddp/{order}/all"
        self._write(store, names[self._rank], record)
        # Only rank 0 reads all records: a thousand ranks would read a million.
        wanted = names if self._rank == 0 else [every]
        found: dict[str, str] = {}
        while True:
            for name in wanted:
                if name not in found and (text := self._read(store, name)) is not None:
                    found[name] = text
            if len(found) == len(wanted):
                break
            left = self._call.deadline - time.monotonic()
            if self._late is None and left < _LAST_LOOK:
                self._late = self._missing(store, names)
            if left <= 0:
                raise self._missing(store, names)
            time.sleep(_STORE_SLICE)
        if self._rank == 0:
            found[every] = json.dumps([found[name] for name in names])
            self._write(store, every, found[every])
        records: list[str] = json.loads(found[every])
        return [text.encode() for text in records]

    def _missing(self, store: Store, names: list[str]) -> Timeout:
        ranks = [r for r in range(self._size) if self._read(store, names[r]) is None] or [0]
        what = timeout_text(ranks, self._call.limit)
        if strangers := [r for r in ranks if store.check([names[r]])]:
            what += (
                f" The store's record of rank {strangers[0]} is not signed with this job's secret: "
                "give all ranks the same TAGI_DDP_SECRET or TAGI_DDP_SECRET_FILE."
            )
        return Timeout(f"{self._where}: {what}", ranks)

    def _signature(self, name: str, record: str) -> str:
        return hmac.digest(self._secret, f"{name} {record}".encode(), "sha256").hex()

    def _write(self, store: Store, name: str, text: str) -> None:
        store.set(name, f"{self._signature(name, text)} {text}")

    def _read(self, store: Store, name: str) -> str | None:
        """Return the record ``name`` if it is signed with the secret, else None."""
        if not store.check([name]):
            return None
        signed, _, record = store.get(name).decode(errors="replace").partition(" ")
        signature = self._signature(name, record)
        return record if hmac.compare_digest(signed.encode(), signature.encode()) else None


@functools.cache  # It warns once for all communicators of a process.
def _warn_of_strangers() -> None:
    warnings.warn(
        "this job has no secret: anyone who reaches the port of its rendezvous can join or disturb "
        "it. On a machine or network that you share with others, set TAGI_DDP_SECRET on "
        "all ranks, or TAGI_DDP_SECRET_FILE to the name of a file of mode 0600 (docs/security.md)",
        RuntimeWarning,
        stacklevel=2,
    )


def _check_interfaces() -> None:
    """Raise BackendUnavailable if GLOO_SOCKET_IFNAME lists an interface that this host lacks."""
    here = [name for _, name in socket.if_nameindex()]
    chosen = chosen_interfaces()
    if not set(chosen) <= set(here):
        raise BackendUnavailable(
            f"GLOO_SOCKET_IFNAME is {','.join(chosen)}, but this host's network interfaces are "
            f"{', '.join(here)}: name some of these, or unset it"
        )


def _environment_store(rank: int, deadline: float) -> Store:
    """Return the store in which the ranks exchange records."""
    try:
        address, port = rendezvous_endpoint()
    except ValueError as error:
        raise BackendUnavailable(
            "gloo's ranks find each other at rank 0's host: start them with torchrun or tagi-ddp "
            "run, or set MASTER_ADDR to its name and MASTER_PORT to a free port on all ranks "
            f"({error})"
        ) from error
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    no_store = (
        f"init on rank {rank} (gloo): no store at {address}, port {port} "
        "(MASTER_ADDR, MASTER_PORT), where rank 0 should listen"
    )
    blamed = [0] if rank else []
    if not hosts and not _await_listener(address, port, deadline):
        raise Timeout(no_store, blamed)  # A TCPStore would retry for another second.
    limit = timedelta(seconds=max(0.01, deadline - time.monotonic()))

    def connect() -> Store:
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

    silent = Timeout(f"{no_store}: what listens there is silent", blamed)
    try:
        return in_time(connect, limit.total_seconds() + _MORE, silent)
    except CommunicatorError:
        raise
    except RuntimeError as error:
        raise Timeout(f"{no_store}: {error}", blamed) from error


def _loopback_port(address: str, port: int) -> int | None:
    """Return a socket for a store that only ranks of this host use; the store closes it.

    None if ranks of other hosts may connect, or if this process has a store there already.
    """
    for loopback, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        if address in (loopback, "localhost"):
            with contextlib.suppress(OSError):
                server = socket.create_server((loopback, port), family=family, backlog=4096)
                return server.detach()
    return None


def _await_listener(address: str, port: int, deadline: float) -> bool:
    """Return True once a store listens there, False at the deadline.

    A TCPStore that connects too early retries after a third of a second or more.
    """
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), left).close()
        except OSError:
            time.sleep(_STORE_SLICE)
        else:
            return True
    return False
