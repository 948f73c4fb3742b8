"""Connections between ranks that can exchange records: by memory, a library, or two levels."""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial

from tagi_ddp.communicators import shm
from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.equality import EARLIER, package_version
from tagi_ddp.communicators.errors import Mismatch
from tagi_ddp.communicators.network.checked import Connect, open_channel, opened
from tagi_ddp.communicators.network.communicator import NetworkCommunicator, OpenLibrary, Sites
from tagi_ddp.communicators.operations import Call
from tagi_ddp.communicators.topology import Location, Topology, remember
from tagi_ddp.communicators.two_level import TwoLevelCommunicator
from tagi_ddp.environment import two_levels

Exchange = Callable[[bytes], Sequence[bytes]]
"""Sends this rank's record to all; returns every rank's, in rank order."""


def connect(
    backend: str,
    rank: int,
    size: int,
    call: Call,
    exchange: Exchange,
    open_library: OpenLibrary,
    *,
    secret: bytes = b"",
    levels: bool = True,
    release: Callable[[], None] = lambda: None,
) -> Communicator:
    """Return the communicator of rank ``rank`` of ``size``; a call of all ranks.

    Ranks of one host share its memory. Ranks of several hosts use a library, and two levels if some
    share a host.

    Args:
        backend: the requested name.
        rank, size: of this process.
        call: all ranks must connect before its deadline.
        exchange: returns all ranks' records, before any rank is connected.
        open_library: connects the ranks, once they have a control channel.
        secret: the job's, if strangers may read the records.
        levels: True: two levels unless TAGI_DDP_TWO_LEVELS is 0; False: only if it is 1.
        release: is called once ``exchange`` is not needed any more, before any rank returns.
    """
    own = [
        astuple(Location.of_this_process(size)),
        os.getuid(),
        two_levels(),
        secrets.token_hex(16),
        package_version(),
    ]
    everyone = [json.loads(record) for record in exchange(json.dumps(own).encode())]
    where = f"init on rank {rank} of {size} ({backend})"
    versions = [each[4] if len(each) > 4 else EARLIER for each in everyone]
    if others := [r for r, version in enumerate(versions) if version != versions[0]]:
        with suppress(RuntimeError):  # The last one may not find the others any more.
            exchange(b"")  # After that all have read the versions.
        raise Mismatch(
            f"{where}: rank {others[0]} has tagi_ddp {versions[others[0]]}, rank 0 has "
            f"{versions[0]}. Install the same version for all ranks.",
            others,
        )
    locations = tuple(Location.of(each[0]) for each in everyone)
    wishes = {each[2] for each in everyone}
    sites = Sites(Topology(locations), "0" not in wishes, levels or "1" in wishes)
    hosts = [location.host for location in locations]
    users = {(host, each[1]) for host, each in zip(hosts, everyone, strict=True)}
    if sites.memory and len(users) > len(set(hosts)):
        sites = replace(sites, memory=False)
        if rank == 0:
            warnings.warn(
                "ranks of one host belong to several users, who cannot share its memory: sums are "
                "slower. Start all ranks as one user.",
                stacklevel=2,
            )
    if sites.in_memory:
        token = everyone[0][3]
        with shm.create(rank, size, f"{token}/all here", call.left(), backend=backend):
            release()
        return _in_memory(backend, rank, sites, token, call, call.limit)
    channel = open_channel(where, rank, hosts, call, exchange, secret)
    release()
    return _on_network(backend, channel, sites, open_library, call, call.limit)


def part_of(
    whole: NetworkCommunicator, call: Call, ranks: list[int], token: str, connect: Connect
) -> Communicator:
    """Return the communicator of some ranks of ``whole``; see `CheckedCommunicator._part`."""
    sites = whole.sites.part(ranks)
    if sites.in_memory:
        rank = ranks.index(whole.rank)
        return _in_memory(whole.backend, rank, sites, token, call, whole.timeout)
    channel, open_part = connect(), partial(whole.library.part, ranks)
    return _on_network(whole.backend, channel, sites, open_part, call, whole.timeout)


def _in_memory(
    backend: str, rank: int, sites: Sites, token: str, call: Call, timeout: float
) -> Communicator:
    """Return the shared-memory communicator of ranks of one host, which alone know ``token``."""
    size = len(sites.topology.locations)
    found = shm.create(rank, size, token, call.left(), backend=backend)
    found.timeout = timeout
    remember(found, sites.topology)
    return found


def _on_network(
    backend: str,
    channel: ControlChannel,
    sites: Sites,
    open_library: OpenLibrary,
    call: Call,
    timeout: float,
) -> NetworkCommunicator:
    """Return the communicator of the ranks of ``channel``."""
    kind = TwoLevelCommunicator if sites.two_levels else NetworkCommunicator
    found = kind(backend, timeout, channel, sites, part_of)
    remember(found, sites.topology)
    return opened(found, partial(found.open, open_library), call)
