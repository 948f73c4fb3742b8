"""The reduction: the arguments by which the replicas of all ranks are made equal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from tagi_ddp.checks import integer, real
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.update.compressed_sum import BITS, Compress

Kind = Literal["mean", "sum", "precision"]
_KINDS = ("mean", "sum", "precision")
Rule = Literal["agreement", "bayes"]
_RULES = ("agreement", "bayes")


@dataclass(frozen=True)
class Reduction:
    """The arguments of `DDPSequential` about its ranks, checked together.

    Raises TypeError or ValueError that names the argument. ``rule`` is the argument ``merge``;
    None: the default, "agreement". ``cap_factor`` None: the engine's.
    """

    kind: Kind = "mean"
    sync_every: int | SyncSchedule = 1
    node_size: int | None = None
    sharded: bool = False
    rule: Rule | None = None
    compress: Compress | None = None
    cap_factor: float | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        kind, every = self.kind, self.sync_every
        if kind not in _KINDS:
            raise ValueError(f'reduction must be "mean", "sum" or "precision", got {kind!r}')
        each_step = not isinstance(every, SyncSchedule) and integer("sync_every", every, 1) == 1
        if kind != "precision" and not (each_step and self.node_size is None):
            raise ValueError(
                f"reduction={kind!r} sums deltas at every step; sync_every and node_size are for "
                '"precision"'
            )
        if kind == "precision" and self.sharded:
            raise ValueError('sharded is for sums and means of deltas, got True with "precision"')
        for name, value, known in (
            ("merge", self.rule, _RULES),
            ("compress", self.compress, tuple(BITS)),
        ):
            if value is not None and value not in known:
                options = ", ".join(f'"{option}"' for option in known)
                raise ValueError(f"{name} must be {options} or None, got {value!r}")
            if value is not None and kind != "precision":
                raise ValueError(
                    f'{name} is for reduction="precision", got {value!r} with {kind!r}, whose sums '
                    "are exact"
                )
        if self.cap_factor is not None and not 0 <= real("cap_factor", self.cap_factor) < math.inf:
            raise ValueError(
                f"cap_factor must be 0 or more, got {self.cap_factor!r}: a step moves by at most a "
                "standard deviation divided by it; 0: without a limit"
            )

    @property
    def merges(self) -> bool:
        """True if posteriors are merged, instead of deltas being reduced at each step."""
        return self.kind == "precision"

    @property
    def average(self) -> bool:
        """True if deltas are averaged."""
        return self.kind == "mean"

    @property
    def adaptive(self) -> bool:
        """True if merges average the changes in which ranks have learned alike."""
        return self.rule != "bayes"

    def check_elastic(self) -> None:
        """Raise ValueError that names an argument which an elastic job cannot have."""
        if self.sharded:
            raise _not_elastic("sharded", self.sharded)
        if isinstance(self.sync_every, SyncSchedule):
            raise _not_elastic("sync_every", self.sync_every)
        if self.node_size is not None:
            raise _not_elastic("node_size", self.node_size)

    def state(self) -> dict[str, Any]:
        """Return the state of the schedule, if there is one; ranks begin with the same."""
        every = self.sync_every
        return {"sync_every": vars(every)} if isinstance(every, SyncSchedule) else {}

    def options(self) -> dict[str, Any]:
        """Return the arguments that must be the same on all ranks, as JSON."""
        every = self.sync_every
        return {
            "reduction": self.kind,
            "sync_every": every.settings if isinstance(every, SyncSchedule) else every,
            "sharded": self.sharded,
            "merge": self.rule or "agreement",
            "compress": self.compress,
            "cap_factor": None if self.cap_factor is None else float(self.cap_factor),
        }


def _not_elastic(name: str, value: object) -> ValueError:
    return ValueError(f"{name} cannot be {value!r} with elastic: leave it out")
