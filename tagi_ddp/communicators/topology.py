"""Where the ranks of a communicator run: hosts, nodes, cores. Gathered once, kept with it."""

from __future__ import annotations

import os
import socket
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.control.mesh import host_id
from tagi_ddp.communicators.objects import all_gather_object
from tagi_ddp.environment import detect


@dataclass(frozen=True)
class Location:
    """Where one rank runs.

    host: what tells its host from others. cores: those that it may run on. bound: whether these are
    not all that the host has. local_rank, local_size: its number among the ranks of its node and
    their number, as the launcher of these ranks tells; 0 and 0 if none does. name: of its host.
    """

    host: str
    cores: tuple[int, ...] = ()
    bound: bool = False
    local_rank: int = 0
    local_size: int = 0
    name: str = ""

    @classmethod
    def of(cls, told: Sequence[Any]) -> Location:
        """Return that of a rank that has told its fields."""
        host, cores, *rest = told
        return cls(host, tuple(cores), *rest)

    @classmethod
    def of_this_process(cls, size: int) -> Location:
        """Return that of this rank of a group of ``size`` ranks."""
        environment, cores = detect(), sorted(os.sched_getaffinity(0))
        told = environment.launcher != "none" and environment.world_size == size
        local = (environment.local_rank, environment.local_world_size) if told else (0, 0)
        bound = len(cores) != os.cpu_count()
        return cls(host_id(), tuple(cores), bound, *local, socket.gethostname())


@dataclass(frozen=True)
class Topology:
    """Where all ranks run, in rank order."""

    locations: tuple[Location, ...]

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on one host."""
        return len({location.host for location in self.locations}) == 1

    def nodes(self, node_size: int | None = None) -> list[list[int]]:
        """Return the ranks of each node.

        Args:
            node_size: how many consecutive ranks make a node; None: those that the launcher counts
                to one, of which several may be on a host, or else those of a host.

        Raises:
            TypeError, ValueError: nodes would differ in size.
        """
        size, first = len(self.locations), self.locations[0].local_size
        if node_size is None and first and self._launcher_counts_in_blocks(first):
            node_size = first
        if node_size is not None:
            if size % integer("node_size", node_size, 1):
                raise ValueError(
                    f"node_size is {node_size}, but {size} ranks do not make equal nodes of that "
                    "size"
                )
            return [list(range(start, start + node_size)) for start in range(0, size, node_size)]
        hosts = [location.host for location in self.locations]
        counts = Counter(hosts)
        if len(set(counts.values())) > 1:
            names = {location.host: location.name for location in self.locations}
            found = ", ".join(f"{count} on {names[host]}" for host, count in counts.items())
            raise ValueError(
                f"hosts have unequal numbers of ranks, {found}: start equally many on each, or "
                "give node_size"
            )
        return ranks_by_host(self.locations)

    def _launcher_counts_in_blocks(self, local_size: int) -> bool:
        return len(self.locations) % local_size == 0 and all(
            (location.local_rank, location.local_size) == (rank % local_size, local_size)
            for rank, location in enumerate(self.locations)
        )

    def share_of_cores(self, rank: int) -> int:
        """Return how many threads a rank may run: its part of the cores it may use, at least 1.

        A core that several ranks of a host may use counts for each of them in part, so ranks that
        are bound to cores get those, and others cores / ranks, the launcher's ranks that are in
        other groups included.
        """
        own = self.locations[rank]
        here = [location for location in self.locations if location.host == own.host]
        share = sum(1 / sum(core in other.cores for other in here) for core in own.cores)
        if not own.bound:
            share *= len(here) / max(len(here), detect().local_world_size)
        return max(1, int(share + 1e-9))


def ranks_by_host(locations: Sequence[Location]) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ones."""
    hosts = [location.host for location in locations]
    return [
        [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)
    ]


_known: weakref.WeakKeyDictionary[Communicator, Topology] = weakref.WeakKeyDictionary()


def remember(communicator: Communicator, topology: Topology) -> None:
    """Keep what is known already of where a communicator's ranks run."""
    _known[communicator] = topology


def topology_of(communicator: Communicator) -> Topology:
    """Return where a communicator's ranks run; a collective call, the first time."""
    found = _known.get(communicator)
    if found is None:
        own = Location.of_this_process(communicator.size)
        everyone: Sequence[Location] = [own]
        if communicator.size > 1:
            everyone = [Location.of(told) for told in all_gather_object(communicator, astuple(own))]
        found = _known[communicator] = Topology(tuple(everyone))
    return found
