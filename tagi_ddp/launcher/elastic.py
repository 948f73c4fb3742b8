"""The launcher's side of an elastic job: it receives join requests and sends assignments."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

from tagi_ddp.launcher.meeting import Assignment
from tagi_ddp.launcher.roll_call import Call, Group, JoinRequest, RollCall

_OVER = json.dumps({"over": True})


def name_of(number: int, attempt: int) -> str:
    """Return the name of a process, unique in its job."""
    return f"{number}/{attempt}"


def number_of(name: str) -> int:
    """Return the number of the rank that a process is, from its name."""
    return int(name.partition("/")[0])


class ElasticJob:
    """The groups of a job, which is elastic if its ranks join any.

    Args:
        names: of the first ranks, in order.
        send: sends a message to the rank of a name, or does nothing if that is gone.
        endpoint_of: the node of the rank of a name, and the address and port of a rank 0 there.
    """

    def __init__(
        self,
        names: Iterable[str],
        send: Callable[[str, str], None],
        endpoint_of: Callable[[str], tuple[int, str, int]],
    ) -> None:
        self._roll = RollCall(names)
        self._send = send
        self._endpoint_of = endpoint_of
        self._last_calls: dict[str, Call] = {}  # by rank

    def outlives(self, number: int) -> bool:
        """Return whether the job goes on, or has ended, without the rank of this number."""
        roll = self._roll
        if not roll.used or roll.lost:
            return False
        goes_on = not roll.over and bool(roll.members)
        return goes_on or number not in map(number_of, roll.group)

    @property
    def group(self) -> list[str]:
        """The ranks of the present group, including those that have ended."""
        return self._roll.group

    @property
    def used(self) -> bool:
        """True if the job is elastic."""
        return self._roll.used

    @property
    def lost(self) -> bool:
        """True if all that the job has learned is lost."""
        return self._roll.lost

    @property
    def ended(self) -> bool:
        """True if all ranks of the last group have ended; ranks that wait to join then end, too."""
        return self.used and not self._roll.members

    def receive(self, name: str, message: dict[str, Any] | None, now: float) -> None:
        """Handle a message of a rank; None: the rank has ended."""
        if message is None:
            self.remove(name)
        elif "come" in message:
            self._roll.join(name, JoinRequest(**message["come"], time=now))
            if self._roll.over:
                self._send(name, _OVER)

    def remove(self, name: str) -> None:
        """Remove a rank that has ended."""
        self._roll.remove(name)
        self._last_calls.pop(name, None)

    def remove_numbers(self, numbers: Collection[int]) -> None:
        """Remove all ranks that have one of these numbers; see `number_of`."""
        for name in [*self._roll.members, *self._roll.waiting]:
            if number_of(name) in numbers:
                self.remove(name)

    def update(self, now: float) -> bool:
        """Send assignments or calls that are due; return whether there is a new group."""
        if self._roll.over:
            return False
        group = self._roll.next_group(now)
        if group is not None:
            self._last_calls.clear()
            self._assign(group)
        elif self._roll.over:
            for name in self._roll.members:
                self._send(name, _OVER)
        elif self._roll.wanted:
            call = self._roll.call
            for name in self._roll.late:
                if self._last_calls.get(name) != call:
                    self._last_calls[name] = call
                    self._send(name, json.dumps({"call": asdict(call)}))
        return group is not None

    def _assign(self, group: Group) -> None:
        nodes = [self._endpoint_of(name) for name in group.members]
        _, address, port = nodes[0]
        for rank, (name, (node, _, _)) in enumerate(zip(group.members, nodes, strict=True)):
            here = [other for other, (number, _, _) in enumerate(nodes) if number == node]
            assignment = Assignment(
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
            self._send(name, assignment.message())
