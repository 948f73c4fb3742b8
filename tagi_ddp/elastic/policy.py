"""The policy that makes a launcher's job elastic: it answers join requests by assignments."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

from tagi_ddp.elastic.membership import Membership
from tagi_ddp.elastic.messages import Call, JoinRequest

_OVER = json.dumps({"over": True})


def name_of(number: int, attempt: int) -> str:
    """Return the name of a process, unique in its job."""
    return f"{number}/{attempt}"


def number_of(name: str) -> int:
    """Return the number of the rank that a process is, from its name."""
    return int(name.partition("/")[0])


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
