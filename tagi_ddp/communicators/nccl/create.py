"""Connection of the ranks of NCCL; if one cannot take part, all raise its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tagi_ddp._backend import Device
from tagi_ddp.communicators.control.mesh import host_id
from tagi_ddp.communicators.errors import BackendUnavailable
from tagi_ddp.communicators.nccl.communicator import NcclCommunicator
from tagi_ddp.communicators.nccl.libraries import NcclMissing, find_device, local_device, open_nccl
from tagi_ddp.communicators.network.checked import open_channel, opened
from tagi_ddp.communicators.operations import Call


def create(
    rank: int,
    world_size: int,
    device_or_rank: tuple[int | None, int],
    timeout: float,
    exchange: Callable[[list[Any]], Sequence[list[Any]]],
) -> NcclCommunicator:
    """Return this rank's communicator, on the device of a number or, if that is None, local rank.

    ``exchange`` returns every rank's value, sent as JSON. Raises BackendUnavailable, on all ranks,
    if one cannot take part, NcclMissing if only NCCL is missing.
    """
    found: Device | None = None
    problem: BackendUnavailable | None = None
    try:
        number, local_rank = device_or_rank
        found = find_device(local_device(local_rank) if number is None else number)
        open_nccl()
    except BackendUnavailable as error:
        problem = error

    def exchange_records(record: bytes) -> Sequence[bytes]:
        own = None if problem is None else [isinstance(problem, NcclMissing), str(problem)]
        answers = exchange([own, record.decode()])
        problems = {rank: each for rank, (each, _) in enumerate(answers) if each is not None}
        if problems:
            only_nccl = all(lacks_nccl for lacks_nccl, _ in problems.values())
            kind = NcclMissing if only_nccl else BackendUnavailable
            texts = [f"rank {rank}: {text}" for rank, (_, text) in problems.items()]
            raise kind("; ".join(texts), list(problems))
        return [record.encode() for _, record in answers]

    call = Call("init", "", timeout, deadline=time.monotonic() + timeout)
    hosts = [host.decode() for host in exchange_records(host_id().encode())]
    where = f"init on rank {rank} of {world_size} (nccl)"
    channel = open_channel(where, rank, hosts, call, exchange_records)
    assert found is not None, "else exchange_records has raised"
    comm = NcclCommunicator(rank, world_size, timeout, channel, found)
    return opened(comm, comm.open, call)
