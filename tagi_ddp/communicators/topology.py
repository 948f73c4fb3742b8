"""The hosts, nodes and cores of a communicator's ranks, gathered once and kept with it."""

from __future__ import annotations

import os
import socket
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Communicator, all_gather_object
from tagi_ddp.communicators.control.mesh import host_id
from tagi_ddp.communicators.cores import quota
from tagi_ddp.environment import detect


@dataclass(frozen=True)
class Location:
    """The host and the cores of one rank.

    host: an identifier of its host. cores: those on which it may run. bound: True if the host has
    more cores. local_rank, local_size: its number among the ranks of its node and their number, by
    the launcher of these ranks; 0 and 0 without one. name: that of its host. quota: the cores'
    time that its cgroup may use, None without a limit; cgroup: the folder of that.
    """

    host: str
    cores: tuple[int, ...] = ()
    bound: bool = False
    local_rank: int = 0
    local_size: int = 0
    name: str = ""
    quota: float | None = None
    cgroup: str = ""

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Location:
        """Return the location that another rank has sent as ``fields``."""
        host, cores, *others = fields
        return cls(host, tuple(cores), *others)

    @classmethod
    def of_this_process(cls, size: int) -> Location:
        """Return the location of this rank of a group of ``size`` ranks."""
        environment, cores = detect(), sorted(os.sched_getaffinity(0))
        known = environment.launcher != "none" and environment.world_size == size
        local = (environment.local_rank, environment.local_world_size) if known else (0, 0)
        bound = len(cores) != os.cpu_count()
        limit = quota()
        limits = (None, "") if limit is None else (limit.cores, limit.cgroup)
        return cls(host_id(), tuple(cores), bound, *local, socket.gethostname(), *limits)


@dataclass(frozen=True)
class Topology:
    """The locations of all ranks, in rank order."""

    locations: tuple[Location, ...]

    @property
    def one_host(self) -> bool:
        """True if all ranks run on one host."""
        return len({location.host for location in self.locations}) == 1

    def nodes(self, node_size: int | None = None) -> list[list[int]]:
        """Return the ranks of each node.

        Args:
            node_size: the number of consecutive ranks of a node; None: that of the launcher, which
                may count several nodes on a host, or else the ranks of a host are a node.

        Raises:
            TypeError, ValueError: nodes would differ in size.
        """
        size, first = len(self.locations), self.locations[0].local_size
        if node_size is None and first and size % first == 0:
            counted = [(one.local_rank, one.local_size) for one in self.locations]
            if counted == [(rank % first, first) for rank in range(size)]:
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

    def share_of_cores(self, rank: int) -> int:
        """Return the number of threads of a rank: its share of the cores it may use, at least 1.

        A core that several ranks of a host may use is divided among them. So ranks that are bound
        to cores get those, and others cores / ranks, which counts the launcher's ranks in other
        groups, too. The ranks of a cgroup with a quota of CPU time share that as well.
        """
        own = self.locations[rank]
        here = [location for location in self.locations if location.host == own.host]
        share = sum(1 / sum(core in other.cores for other in here) for core in own.cores)
        if not own.bound:
            share *= len(here) / max(len(here), detect().local_world_size)
        if own.quota is not None:
            sharing = sum(location.cgroup == own.cgroup for location in here)
            if sharing == len(here):
                sharing = max(sharing, detect().local_world_size)
            share = min(share, own.quota / sharing)
        return max(1, int(share + 1e-9))


def ranks_by_host(locations: Sequence[Location]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks."""
    hosts = [location.host for location in locations]
    return [
        [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)
    ]


_known: weakref.WeakKeyDictionary[Communicator, Topology] = weakref.WeakKeyDictionary()


def remember(communicator: Communicator, topology: Topology) -> None:
    """Keep ``topology``, which is known already, for `topology_of`."""
    _known[communicator] = topology


def topology_of(communicator: Communicator) -> Topology:
    """Return the topology of a communicator's ranks; a collective call, the first time."""
    found = _known.get(communicator)
    if found is None:
        own = Location.of_this_process(communicator.size)
        everyone: Sequence[Location] = [own]
        if communicator.size > 1:
            everyone = [Location.of(each) for each in all_gather_object(communicator, astuple(own))]
        found = _known[communicator] = Topology(tuple(everyone))
    return found
