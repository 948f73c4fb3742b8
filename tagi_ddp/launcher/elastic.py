"""The launcher's part of an elastic job: it hears who comes, and tells the ranks their places."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

from tagi_ddp.launcher.meeting import Seat
from tagi_ddp.launcher.roll_call import Call, Coming, Group, RollCall

_OVER = json.dumps({"over": True})


def name_of(number: int, attempt: int) -> str:
    """Return what no other process of the job is called."""
    return f"{number}/{attempt}"


def number_of(name: str) -> int:
    """Return the number of the rank whose place the process has taken."""
    return int(name.partition("/")[0])


class ElasticJob:
    """The meetings of a job, which is elastic if its ranks come to any.

    Args:
        names: of the first ranks, in order.
        tell: sends a message to the rank of a name, or does nothing if that is gone.
        node_of: the host of the rank of a name, by its number, and where its rank 0 can listen.
    """

    def __init__(
        self,
        names: Iterable[str],
        tell: Callable[[str, str], None],
        node_of: Callable[[str], tuple[int, str, int]],
    ) -> None:
        self._roll = RollCall(names)
        self._tell = tell
        self._node_of = node_of
        self._told: dict[str, Call] = {}  # the last call of each rank

    def outlives(self, number: int) -> bool:
        """Tell whether it goes on, or has come to its end, without the rank of this number."""
        roll = self._roll
        if not roll.used or roll.lost:
            return False
        goes_on = not roll.over and bool(roll.members)
        return goes_on or number not in map(number_of, roll.group)

    @property
    def group(self) -> list[str]:
        """The ranks of the present group, also those that have ended."""
        return self._roll.group

    @property
    def used(self) -> bool:
        """Whether the job is elastic."""
        return self._roll.used

    @property
    def lost(self) -> bool:
        """Whether what it has learned is gone."""
        return self._roll.lost

    @property
    def ended(self) -> bool:
        """Whether all ranks of the last group have ended, so that those who came later do, too."""
        return self.used and not self._roll.members

    def hear(self, name: str, message: dict[str, Any] | None, now: float) -> None:
        """Take what a rank says; None: it has ended."""
        if message is None:
            self.gone(name)
        elif "come" in message:
            self._roll.come(name, Coming(**message["come"], time=now))
            if self._roll.over:
                self._tell(name, _OVER)

    def gone(self, name: str) -> None:
        """Take note of a rank that has ended."""
        self._roll.gone(name)
        self._told.pop(name, None)

    def lose(self, numbers: Collection[int]) -> None:
        """Take note of all that had one of these numbers; see `number_of`."""
        for name in [*self._roll.members, *self._roll.waiting]:
            if number_of(name) in numbers:
                self.gone(name)

    def update(self, now: float) -> bool:
        """Call who should come, and tell of the next group; return whether there is one."""
        if self._roll.over:
            return False
        group = self._roll.next_group(now)
        if group is not None:
            self._told.clear()
            self._seat(group)
        elif self._roll.over:
            for name in self._roll.members:
                self._tell(name, _OVER)
        elif self._roll.wanted:
            call = self._roll.call
            for name in self._roll.late:
                if self._told.get(name) != call:
                    self._told[name] = call
                    self._tell(name, json.dumps({"call": asdict(call)}))
        return group is not None

    def _seat(self, group: Group) -> None:
        nodes = [self._node_of(name) for name in group.members]
        _, address, port = nodes[0]
        for rank, (name, (node, _, _)) in enumerate(zip(group.members, nodes, strict=True)):
            here = [other for other, (number, _, _) in enumerate(nodes) if number == node]
            seat = Seat(
                group.number,
                rank,
                len(nodes),
                here.index(rank),
                len(here),
                group.source,
                group.behind,
                group.stayed,
                address,
                port,
            )
            self._tell(name, seat.message())
