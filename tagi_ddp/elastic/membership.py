"""The members of an elastic job's groups: the decisions of its launcher, without its pipes.

A rank asks to join when it starts and when it has lost another rank. The next group is made once
all ranks of the present one ask, except those that are gone or left out. New ranks are admitted if
all ranks of the group ask between two steps; the launcher calls them to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tagi_ddp.elastic.messages import Assignment, Call, JoinRequest, find_source

# Seconds that a rank has to join after all others have, if one of them reports it as lost.
_GRACE = 1.0


class Membership:
    """The groups of one job; the ``expected`` ranks make the first one.

    ``endpoint_of`` returns the node of a rank, and the address and port of a rank 0 there.
    """

    def __init__(
        self, expected: Iterable[str], endpoint_of: Callable[[str], tuple[int, str, int]]
    ) -> None:
        self.members = list(expected)
        """The ranks of the present group that are not gone, in rank order."""
        self.groups = 0
        """The number of groups so far."""
        self.over = False
        """True if all ranks have reported that they are done."""
        self.lost = False
        """True if all ranks with a learned state are gone."""
        self._ranks = {name: rank for rank, name in enumerate(self.members)}
        self._endpoint_of = endpoint_of
        self._learned = False  # True if a rank has reported a learned state
        self._waiting: dict[str, JoinRequest] = {}  # in the order of the requests

    @property
    def used(self) -> bool:
        """True if the job is elastic: a rank has asked to join a group."""
        return self.groups > 0 or bool(self._waiting)

    @property
    def group(self) -> list[str]:
        """The ranks of the present group, including those that are gone."""
        return list(self._ranks)

    @property
    def waiting(self) -> list[str]:
        """The ranks that wait for the next group."""
        return list(self._waiting)

    def join(self, name: str, request: JoinRequest) -> None:
        """Add a rank that waits for the next group."""
        self._waiting[name] = request
        self._learned |= request.progress is not None

    def remove(self, name: str) -> None:
        """Remove a rank that has ended."""
        self._waiting.pop(name, None)
        if name in self.members:
            self.members.remove(name)

    @property
    def wanted(self) -> bool:
        """True if another group is needed: a rank is gone, has returned, or waits to join."""
        waits = any(not request.done for request in self._waiting.values())
        return self.groups > 0 and (waits or len(self._ranks) > len(self.members))

    @property
    def late(self) -> list[str]:
        """The ranks of the present group that have not asked to join the next one."""
        return [name for name in self.members if name not in self._waiting]

    @property
    def call(self) -> Call:
        """The call to the ranks that are late."""
        requests = [each for name, each in self._waiting.items() if name in self.members]
        progress = [each.progress for each in requests if each.progress is not None]
        joins = not requests and len(self._ranks) == len(self.members)
        return Call(min(progress, default=None), joins)

    def next_group(self, now: float) -> dict[str, Assignment]:
        """Return the ranks' assignments in the next group, in rank order; {} if it must wait."""
        if not self._waiting or not all(self._left_out(name, now) for name in self.late):
            return {}
        if self.groups and not self.members:  # All ranks have ended.
            return {}
        stayed = [name for name in self.members if name in self._waiting]
        if stayed and all(self._waiting[name].done for name in stayed):
            self.over = True
            return {}
        admits = all(self._waiting[name].admits for name in stayed)
        members = stayed + [name for name in self._waiting if admits and name not in stayed]
        # A rank that was left out and returns has learned something else than the group.
        progress = [self._waiting[name].progress if name in stayed else None for name in members]
        if self._learned and all(each is None for each in progress):
            self.lost, self.members = True, []
            return {}
        self.groups += 1
        self.members = members
        self._ranks = {name: rank for rank, name in enumerate(members)}
        for name in members:
            del self._waiting[name]
        return self._assignments(*find_source(progress), len(stayed))

    def _assignments(
        self, source: int, behind: tuple[int, ...], stayed: int
    ) -> dict[str, Assignment]:
        members = self.members
        nodes, addresses, ports = zip(*map(self._endpoint_of, members), strict=True)
        shared = len(members), source, behind, stayed
        return {
            name: Assignment(
                self.groups,
                rank,
                *shared,
                nodes[:rank].count(nodes[rank]),
                nodes.count(nodes[rank]),
                addresses[0],
                ports[0],
            )
            for rank, name in enumerate(members)
        }

    def _left_out(self, name: str, now: float) -> bool:
        """Return whether the others go on without a rank that has not asked to join."""
        rank = self._ranks[name]
        requests = [each for other, each in self._waiting.items() if other in self.members]
        if not requests:
            return False
        blamed = any(rank in request.blamed for request in requests)
        last = max(request.time for request in requests)
        # Before anything is learned, ranks wait with patience: processes take long to start.
        return (self._learned and blamed and now >= last + _GRACE) or any(
            now >= request.time + request.patience for request in requests
        )
