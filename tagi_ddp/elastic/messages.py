"""Messages between a rank and the launcher of its elastic job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PREEMPTED = 75
"""The exit status of a rank that has saved a checkpoint, as a signal announced its end.

It is EX_TEMPFAIL of sysexits.h: try again later.
"""


@dataclass(frozen=True)
class JoinRequest:
    """The request of a rank to join the next group.

    progress: the number of updates of all ranks that its replica has taken; None: it has only
    started. blamed: ranks of its last group that it counts as lost. done: True if it has nothing
    left to do. admits: True if it is between two steps, where the next call of its script matches
    the first call of a new rank. patience: the seconds for which it waits for the others. time: of
    the request, by one clock for all ranks.
    """

    progress: int | None
    blamed: Sequence[int] = ()
    done: bool = False
    admits: bool = True
    patience: float = 0.0
    time: float = 0.0


@dataclass(frozen=True)
class Call:
    """The launcher's call to a rank to join the next group.

    progress: the least of the group's ranks that wait for it; None: none waits, or none has learned
    anything. joins: True if new ranks wait to join, and there is no other reason.
    """

    progress: int | None
    joins: bool


@dataclass(frozen=True)
class Assignment:
    """A rank's number in the next group, and the group.

    number: of the group. source: the rank with the latest state. behind: the ranks that copy that
    state, as theirs is older or missing. stayed: the number of ranks, the first ones, that were in
    the group before; the others are new, or return. address, port: at which rank 0 can listen and
    all ranks reach it.
    """

    number: int
    rank: int
    size: int
    source: int
    behind: tuple[int, ...]
    stayed: int
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0

    @classmethod
    def of(cls, values: dict[str, Any]) -> Assignment:
        """Return the assignment with these fields, which have been sent as JSON."""
        return cls(**{**values, "behind": tuple(values["behind"])})

    def enter(self, job: str) -> None:
        """Set the environment of this process to the assignment, in a group of ``job``."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size)
        name = f"{job}/{self.number}"  # Groups of different names do not connect.
        os.environ.update(rank_variables(*numbers, name, self.address, self.port))


def rank_variables(
    rank: int, size: int, local_rank: int, local_size: int, job: str, address: str, port: int
) -> dict[str, str]:
    """Return the environment variables of a rank, also those of torchrun."""
    numbers = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    return {
        **numbers,
        **{f"TAGI_DDP_{name}": value for name, value in numbers.items()},
        "TAGI_DDP_JOB": job,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def find_source(progress: Sequence[int | None]) -> tuple[int, tuple[int, ...]]:
    """Return the first rank with the latest state, and all ranks with an older state or none."""
    latest = max((each for each in progress if each is not None), default=None)
    behind = tuple(rank for rank, each in enumerate(progress) if each != latest)
    return progress.index(latest), behind
