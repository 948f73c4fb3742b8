"""Groups of an elastic job: the decisions of the launcher, without its pipes.

A rank asks to join when it starts and when it has lost another rank. The next group is made once
all ranks of the present one ask, except those that are gone or left out. New ranks are admitted if
all ranks of the group ask between two steps; the launcher calls them to do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Seconds that a rank has to join after all others have, if one of them reports it as lost.
_GRACE = 1.0


@dataclass
class JoinRequest:
    """The request of a rank to join the next group.

    progress: the number of updates of all ranks that its replica has taken; None: it has only
    started. blamed: ranks of its last group that it counts as lost. patience: the seconds for which
    it waits for the others. done: True if it has nothing left to do. admits: True if it is between
    two steps, where the next call of its script matches the first call of a new rank. time: by one
    clock for all ranks.
    """

    progress: int | None
    blamed: list[int]
    patience: float
    done: bool
    admits: bool
    time: float


@dataclass(frozen=True)
class Group:
    """The ranks of the next group, by the launcher's names.

    members: in rank order. source: the rank with the latest state. behind: the ranks that copy that
    state, as theirs is older or missing. stayed: the number of ranks, the first ones, that were in
    the group before; the others are new, or return.
    """

    number: int
    members: tuple[str, ...]
    source: int
    behind: tuple[int, ...]
    stayed: int


@dataclass(frozen=True)
class Call:
    """The launcher's call to a rank to join the next group.

    progress: the least of the group's ranks that wait for it; None: none waits, or none has learned
    anything. joins: True if new ranks wait to join, and there is no other reason.
    """

    progress: int | None
    joins: bool


def find_source(progress: Sequence[int | None]) -> tuple[int, tuple[int, ...]]:
    """Return the first rank with the latest state, and all ranks with an older state or none."""
    latest = max((each for each in progress if each is not None), default=None)
    behind = tuple(rank for rank, each in enumerate(progress) if each != latest)
    return progress.index(latest), behind


class RollCall:
    """The groups of one job; the ``expected`` ranks make the first one."""

    def __init__(self, expected: Iterable[str]) -> None:
        self.members = list(expected)
        """The ranks of the present group that are not gone, in rank order."""
        self.groups = 0
        """The number of groups so far."""
        self.over = False
        """True if all ranks have reported that they are done."""
        self.lost = False
        """True if all ranks with a learned state are gone."""
        self._ranks = {name: rank for rank, name in enumerate(self.members)}
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

    def next_group(self, now: float) -> Group | None:
        """Return the next group if it can be made; its ranks no longer wait."""
        if not self._waiting or not all(self._left_out(name, now) for name in self.late):
            return None
        if self.groups and not self.members:  # All ranks have ended.
            return None
        stayed = [name for name in self.members if name in self._waiting]
        if stayed and all(self._waiting[name].done for name in stayed):
            self.over = True
            return None
        admits = all(self._waiting[name].admits for name in stayed)
        members = stayed + [name for name in self._waiting if admits and name not in stayed]
        # A rank that was left out and returns has learned something else than the group.
        progress = [self._waiting[name].progress if name in stayed else None for name in members]
        if self._learned and all(each is None for each in progress):
            self.lost, self.members = True, []
            return None
        source, behind = find_source(progress)
        self.groups += 1
        self.members = members
        self._ranks = {name: rank for rank, name in enumerate(members)}
        for name in members:
            del self._waiting[name]
        return Group(self.groups, tuple(members), source, behind, len(stayed))

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
