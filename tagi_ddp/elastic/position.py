"""A rank's position in the script of an elastic job, which its group compares after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.equality import Entry, RanksDiffer, first_difference


@dataclass
class Position:
    """The position of this rank in its script.

    If a rank is lost, the others are at most one collective call apart: one may wait in a save that
    another has completed. From this each rank of the next group finds how to continue.

    calls: the number of collective calls, beside steps, that the group has completed. steps: the
    number of steps that had been made when this rank began its last step; None before its first
    one. plan: the settings of the group's loop over `DDPSequential.steps`; None if there is none
    yet. aligned: True if this rank makes the same calls as all others: they are after the same
    step, which has been made.
    """

    calls: int = 0
    steps: int | None = None
    plan: list[Entry] | None = None
    aligned: bool = True

    def begin_step(self, steps_made: int) -> None:
        """Record the step that begins."""
        self.steps, self.aligned = steps_made, True

    def compare(
        self, communicator: Communicator, stayed: int, returned: bool, steps_made: int
    ) -> None:
        """Compare the positions of the ranks of a new group; a collective call.

        Args:
            communicator: of the group.
            stayed: the number of ranks, the first ones, that were in the group before. The others
                have no position yet, or another one.
            returned: True if this rank is one of these others, and has been in an earlier group.
            steps_made: the number of steps that the group has made.
        """
        everyone: list[dict[str, Any]] = all_gather_object(communicator, asdict(self))
        made = {
            None if each["steps"] is None else each["steps"] + 1 == steps_made
            for each in everyone[:stayed]
        }
        self.aligned = made in ({True}, {None}) and not returned
        self.calls = max(each["calls"] for each in everyone)
        plans = [each["plan"] for each in everyone if each["plan"] is not None]
        if plans and self.plan is None:
            self.plan = [(name, value) for name, value in plans[0]]

    def follow(self, plan: Sequence[Entry]) -> None:
        """Raise RanksDiffer unless the other ranks loop over the same plan as this one."""
        assert self.plan is not None
        if difference := first_difference(self.plan, plan):
            raise RanksDiffer(
                f"steps() differs from that of the other ranks, first at {difference}. Give all "
                "ranks the same data and arguments"
            )
