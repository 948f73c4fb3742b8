"""This host's part of a job: the numbers, environment and port of its ranks."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import dataclass

from tagi_ddp.communicators.cores import usable_cores
from tagi_ddp.elastic.messages import rank_variables
from tagi_ddp.environment import shows_bars

_THREADS = ("OMP_NUM_THREADS", "TAGI_DDP_THREADS")


@dataclass(frozen=True)
class HostAssignment:
    """The numbers of a host's ranks in their job, and the address of rank 0."""

    first: int
    world_size: int
    job: str
    secret: str
    address: str
    port: int

    def environment(self, local: int, nprocs: int) -> dict[str, str]:
        """Return this process's environment with the variables of rank ``local`` of ``nprocs``.

        Those of torchrun are among them.
        """
        # torch would ask the agent of an outer torchrun for the address of rank 0.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        numbers = (self.first + local, self.world_size, local, nprocs)
        threads = str(max(1, int(usable_cores() / nprocs)))
        # The second name says that the first one is not the user's.
        own = {} if "OMP_NUM_THREADS" in inherited else dict.fromkeys(_THREADS, threads)
        return {
            "TAGI_DDP_TERMINAL": str(int(shows_bars(sys.stderr))),
            **inherited,
            **own,
            **rank_variables(*numbers, self.job, self.address, self.port),
            "TAGI_DDP_SECRET": self.secret,
        }


def new_job() -> str:
    """Return a name that no other job has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def reserve_port(one_host: bool = True) -> socket.socket:
    """Return a socket that reserves a free TCP port while it is open.

    It is bound to the loopback interface, of IPv4 if there is one, or to all interfaces. It does
    not listen, and others may reuse its address, so that a store can listen there.
    """
    try:
        return _bound(socket.AF_INET, "127.0.0.1" if one_host else "")
    except OSError:
        if not one_host:
            raise
        return _bound(socket.AF_INET6, "::1")


def _bound(family: int, address: str) -> socket.socket:
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
    except BaseException:
        holder.close()
        raise
    return holder
