"""Which ranks make the next group of an elastic job: what the launcher decides, without its pipes.

A rank comes when it begins, and when it has lost another; a group is made when all of the last one
have come, but for those that are gone or are left behind. Ranks that come later join when all ranks
of the group stand between two steps, and are asked to come there, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Seconds that a rank has to come by after all others came, of which one says that it is lost.
_GRACE = 1.0


@dataclass
class Coming:
    """What a rank says when it comes.

    progress: how many updates of all ranks its replica has taken; None: it has only begun.
    blamed: ranks of its last group that it takes for lost. patience: for so many seconds it waits
    for the others. done: it has nothing left to do. admits: it stands between two steps, so that
    the next call of its script fits the first one of a rank that joins. time: of a clock that all
    share.
    """

    progress: int | None
    blamed: list[int]
    patience: float
    done: bool
    admits: bool
    time: float


@dataclass(frozen=True)
class Group:
    """The ranks of the next group, by what the launcher calls them.

    members: in rank order. source: the rank whose state is the latest. behind: the ranks that take
    that state, as theirs is an older one or none. stayed: the number of ranks, the first ones, that
    were in the group before; the others join, or come back.
    """

    number: int
    members: tuple[str, ...]
    source: int
    behind: tuple[int, ...]
    stayed: int


@dataclass(frozen=True)
class Call:
    """A request to come for the next group.

    progress: the least of the group's ranks that wait for it; None: none waits, or none has learned
    anything. joins: ranks wait to join, and nothing else has happened.
    """

    progress: int | None
    joins: bool


def who_leads(progress: Sequence[int | None]) -> tuple[int, tuple[int, ...]]:
    """Return the first rank with the latest state, and all whose state is an older one."""
    latest = max((each for each in progress if each is not None), default=None)
    behind = tuple(rank for rank, each in enumerate(progress) if each != latest)
    return progress.index(latest), behind


class RollCall:
    """The groups of one job, whose ranks are ``expected`` to make the first one."""

    def __init__(self, expected: Iterable[str]) -> None:
        self.members = list(expected)
        """Those of the present group, in rank order."""
        self.groups = 0
        """How many groups there have been."""
        self.over = False
        """Whether all have said that they are done."""
        self.lost = False
        """Whether what the job has learned is gone with the ranks that knew it."""
        self._ranks = {who: rank for rank, who in enumerate(self.members)}
        self._learned = False  # whether a rank has said that it has learned something
        self._waiting: dict[str, Coming] = {}  # in the order in which they came

    @property
    def used(self) -> bool:
        """Whether the job is elastic: a rank has come."""
        return self.groups > 0 or bool(self._waiting)

    @property
    def group(self) -> list[str]:
        """Those of the present group, also those that are gone."""
        return list(self._ranks)

    @property
    def waiting(self) -> list[str]:
        """Those who have come for the next group."""
        return list(self._waiting)

    def come(self, who: str, coming: Coming) -> None:
        """Take note of a rank that waits for the next group."""
        self._waiting[who] = coming
        self._learned |= coming.progress is not None

    def gone(self, who: str) -> None:
        """Take note of a rank that is no more."""
        self._waiting.pop(who, None)
        if who in self.members:
            self.members.remove(who)

    @property
    def wanted(self) -> bool:
        """Whether there should be another group: one is gone, has come back, or wants to join."""
        waits = any(not coming.done for coming in self._waiting.values())
        return self.groups > 0 and (waits or len(self._ranks) > len(self.members))

    @property
    def late(self) -> list[str]:
        """The ranks of the present group that have not come for the next one."""
        return [who for who in self.members if who not in self._waiting]

    @property
    def call(self) -> Call:
        """The request to the ranks that are late."""
        there = [coming for who, coming in self._waiting.items() if who in self.members]
        progress = [coming.progress for coming in there if coming.progress is not None]
        joins = not there and len(self._ranks) == len(self.members)
        return Call(min(progress, default=None), joins)

    def next_group(self, now: float) -> Group | None:
        """Return the next group, whose ranks wait no longer, once it is known."""
        if not self._waiting or not all(self._left(who, now) for who in self.late):
            return None
        if self.groups and not self.members:  # they have ended
            return None
        there = [who for who in self.members if who in self._waiting]
        if there and all(self._waiting[who].done for who in there):
            self.over = True
            return None
        admits = all(self._waiting[who].admits for who in there)
        members = there + [who for who in self._waiting if admits and who not in there]
        # What was learned by one that had been left behind is not what the others have learned.
        progress = [self._waiting[who].progress if who in there else None for who in members]
        if self._learned and all(each is None for each in progress):
            self.lost, self.members = True, []
            return None
        source, behind = who_leads(progress)
        self.groups += 1
        self.members = members
        self._ranks = {who: rank for rank, who in enumerate(members)}
        for who in members:
            del self._waiting[who]
        return Group(self.groups, tuple(members), source, behind, len(there))

    def _left(self, who: str, now: float) -> bool:
        """Tell whether the others go on without a rank that has not come."""
        rank = self._ranks[who]
        there = [coming for other, coming in self._waiting.items() if other in self.members]
        if not there:
            return False
        blamed = any(rank in coming.blamed for coming in there)
        last = max(coming.time for coming in there)
        # Processes take long to start, and nothing is lost yet by waiting for them.
        return (self._learned and blamed and now >= last + _GRACE) or any(
            now >= coming.time + coming.patience for coming in there
        )
