"""The members of an elastic job's groups, as its launcher decides them.

A rank asks to join when it starts and when it has lost another rank. The next group is made once
all ranks of the present one ask, except those that are gone or left out. New ranks are admitted if
all ranks of the group ask between two steps; the launcher calls them to do so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

from tagi_ddp.elastic.messages import Assignment, Call, JoinRequest, find_source

# Seconds that a rank has to join after all others have, if one of them reports it as lost.
_GRACE = 1.0

_OVER = json.dumps({"over": True})


def name_of(number: int, attempt: int) -> str:
    """Return the name of a process, unique in its job."""
    return f"{number}/{attempt}"


def number_of(name: str) -> int:
    """Return the number of the rank that a process is, from its name."""
    return int(name.partition("/")[0])


class Membership:
    """The decisions on the groups of one job; the ``expected`` ranks make the first one.

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


class ElasticPolicy:
    """The groups of a job, which is elastic if its ranks join any.

    Args:
        names: of the first ranks, in order.
        send: sends a message to the rank of a name, or does nothing if that is gone.
        endpoint_of: see `Membership`.
    """

    def __init__(
        self,
        names: Iterable[str],
        send: Callable[[str, str], None],
        endpoint_of: Callable[[str], tuple[int, str, int]],
    ) -> None:
        self._membership = Membership(names, endpoint_of)
        self._send = send
        self._last_calls: dict[str, Call] = {}  # by rank

    def outlives(self, number: int) -> bool:
        """Return whether the job goes on, or has ended, without the rank of this number."""
        membership = self._membership
        if not membership.used or membership.lost:
            return False
        goes_on = not membership.over and bool(membership.members)
        return goes_on or number not in map(number_of, membership.group)

    def awaits(self, name: str) -> bool:
        """Return whether the job waits for the end of a rank: not if it is outside the group."""
        return not self._membership.used or name in self._membership.group

    @property
    def lost(self) -> bool:
        """True if all that the job has learned is lost."""
        return self._membership.lost

    @property
    def ended(self) -> bool:
        """True if all ranks of the last group have ended; ranks that wait to join then end, too."""
        return self._membership.used and not self._membership.members

    def receive(self, name: str, message: dict[str, Any] | None, now: float) -> None:
        """Handle a message of a rank; None: the rank has ended."""
        if message is None:
            self.remove(name)
        elif "join" in message:
            self._membership.join(name, JoinRequest(**{**message["join"], "time": now}))
            if self._membership.over:
                self._send(name, _OVER)

    def remove(self, name: str) -> None:
        """Remove a rank that has ended."""
        self._membership.remove(name)
        self._last_calls.pop(name, None)

    def remove_numbers(self, numbers: Collection[int]) -> None:
        """Remove all ranks that have one of these numbers; see `number_of`."""
        for name in [*self._membership.members, *self._membership.waiting]:
            if number_of(name) in numbers:
                self.remove(name)

    def update(self, now: float) -> bool:
        """Send assignments or calls that are due; return whether there is a new group."""
        membership = self._membership
        if membership.over:
            return False
        assignments = membership.next_group(now)
        for name, assignment in assignments.items():
            self._send(name, json.dumps({"assignment": asdict(assignment)}))
        if assignments:
            self._last_calls.clear()
        elif membership.over:
            for name in membership.members:
                self._send(name, _OVER)
        elif membership.wanted:
            call = membership.call
            for name in membership.late:
                if self._last_calls.get(name) != call:
                    self._last_calls[name] = call
                    self._send(name, json.dumps({"call": asdict(call)}))
        return bool(assignments)
