"""The schedule of DASO: arithmetic on epochs, losses and batch numbers, without torch.

The ranks of a node synchronize often. Nodes synchronize seldom and without waiting; more often once
the loss stops falling. Source: Coquelin et al. 2022, "Accelerating neural network training with
distributed asynchronous and selective optimization (DASO)", Journal of Big Data 9.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, Literal

from tagi_ddp.checks import integer, real

Phase = Literal["warmup", "cycling", "cooldown"]

_PATIENCE = 2  # The number of epochs without improvement after which a loss is stable.


@dataclass(frozen=True)
class Skips:
    """The numbers of batches between two synchronizations; 1 <= batches_to_wait <= global_skip.

    A global synchronization begins every ``global_skip`` batches and is merged ``batches_to_wait``
    batches later. The ranks of a node synchronize after each batch of this wait, and otherwise
    every ``local_skip`` batches.
    """

    global_skip: int
    local_skip: int
    batches_to_wait: int


@dataclass(frozen=True)
class Sync:
    """The synchronizations after a batch, in this order.

    local: the ranks of each node synchronize.
    merge: the age in batches of the sent copies that are merged now; 0: nothing is merged.
    send: the number of this send in the epoch, from 0; None: no group sends. Global groups take
        turns: the group is ``send`` modulo the number of groups. Its copies are merged later.
    blocking: all ranks of all nodes average, and wait for one another.
    """

    local: bool = False
    merge: int = 0
    send: int | None = None
    blocking: bool = False


@dataclass
class Stability:
    """The progress of a loss, which is stable if it no longer improves.

    level: the fraction of the best loss by which another must be lower to improve on it.
    best: the lowest loss.
    epochs: the number of cycling epochs without improvement; after two of them the loss is stable.
    """

    level: float
    best: float = math.inf
    epochs: int = 0

    def improves(self, loss: float) -> bool:
        """Record a loss, and return whether it improves on the best one."""
        improved = math.isinf(self.best) or self.best - loss > self.level * abs(self.best)
        self.best = min(self.best, loss)
        return improved


class SyncSchedule:
    """A schedule that returns after each batch which ranks synchronize.

    In the first ``warmup_epochs`` and the last ``cooldown_epochs`` all ranks synchronize after
    every batch. The epochs between them cycle: they begin with the longest skips, which are divided
    whenever the loss has been stable for two epochs. The longest skips follow those of 1. All ranks
    synchronize after the last batch of each epoch: nothing is in flight between epochs.

    Args:
        total_epochs: the number of epochs, 1 or more.
        warmup_epochs: 0 or more.
        cooldown_epochs: 0 or more; may overlap with the warm-up.
        stability_level: a loss that improves on the best one by no more than this fraction of it
            is stable; 0 or more.
        max_global_skips: the longest ``global_skip``, 1 or more.
        skip_reduction_factor: the divisor of the skips, 2 or more.
        local_skip_factor: the number of local synchronizations for each global one at first, 1 or
            more.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes; all types are
            checked before any value.
    """

    def __init__(
        self,
        total_epochs: int,
        warmup_epochs: int = 4,
        cooldown_epochs: int = 4,
        stability_level: float = 0.05,
        max_global_skips: int = 8,
        skip_reduction_factor: int = 2,
        local_skip_factor: int = 4,
    ) -> None:
        """Check the arguments and begin with the first epoch."""
        counts = {
            "total_epochs": (total_epochs, 1),
            "warmup_epochs": (warmup_epochs, 0),
            "cooldown_epochs": (cooldown_epochs, 0),
            "max_global_skips": (max_global_skips, 1),
            "skip_reduction_factor": (skip_reduction_factor, 2),
            "local_skip_factor": (local_skip_factor, 1),
        }
        for name, (value, _) in counts.items():
            integer(name, value)
        self.stability: Stability = Stability(real("stability_level", stability_level))
        checked = {name: integer(name, value, low) for name, (value, low) in counts.items()}
        if not 0 <= self.stability.level < math.inf:
            raise ValueError(f"stability_level must be 0 or more, got {stability_level}")
        self._total = checked["total_epochs"]
        self._warmup = checked["warmup_epochs"]
        self._cooldown = checked["cooldown_epochs"]
        self._reduction = checked["skip_reduction_factor"]
        longest = checked["max_global_skips"]
        self._longest = Skips(
            longest, max(1, longest // checked["local_skip_factor"]), max(1, longest // 4)
        )
        self.epoch: int = 0
        self.skips: Skips = self._longest

    @property
    def settings(self) -> dict[str, int | float]:
        """The constants, by name: the arguments, and the skips that follow from them."""
        return {
            "total_epochs": self._total,
            "warmup_epochs": self._warmup,
            "cooldown_epochs": self._cooldown,
            "stability_level": self.stability.level,
            "skip_reduction_factor": self._reduction,
            **asdict(self._longest),
        }

    @property
    def phase(self) -> Phase:
        """The phase of this epoch: "warmup" and "cooldown" block after every batch."""
        if self.epoch < self._warmup:
            return "warmup"
        return "cooldown" if self.epoch >= self._total - self._cooldown else "cycling"

    def after(self, batch: int, batches: int) -> Sync:
        """Return the synchronizations after batch ``batch``, from 0, of this epoch's ``batches``.

        Raises TypeError or ValueError if there is no such batch.
        """
        batches = integer("batches", batches, 1)
        batch = integer("batch", batch, 0)
        if batch >= batches:
            raise ValueError(f"batch is {batch}, but there are {batches}, numbered from 0")
        if self.phase != "cycling":
            return Sync(blocking=True)
        skip, wait = self.skips.global_skip, self.skips.batches_to_wait
        waited = (batch - 1) % skip + 1 if batch else 0  # Batches since the last send.
        if batch == batches - 1:
            return Sync(merge=waited if waited <= wait else 0, blocking=True)
        merge = waited if waited == wait else 0
        send = batch // skip if batch % skip == 0 else None
        in_flight = 0 < waited <= wait
        local = batch % self.skips.local_skip == 0 or in_flight or send is not None
        return Sync(local, merge, send)

    def end_epoch(self, loss: float) -> None:
        """Begin the next epoch, with other skips if the loss, the same on all ranks, is stable.

        Raises TypeError or ValueError if ``loss`` is no finite number.
        """
        loss = real("loss", loss)
        if not math.isfinite(loss):
            raise ValueError(f"loss must be finite, got {loss}")
        improved = self.stability.improves(loss)
        if self.phase == "cycling":
            self.stability.epochs = 0 if improved else self.stability.epochs + 1
            if self.stability.epochs == _PATIENCE:
                self.stability.epochs = 0
                self._shorten()
        self.epoch += 1

    def _shorten(self) -> None:
        if self.skips.global_skip == 1:
            self.skips = self._longest
            return
        self.skips = Skips(*(max(1, skip // self._reduction) for skip in astuple(self.skips)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, as numbers by name."""
        return {
            "epoch": self.epoch,
            "best": self.stability.best,
            "stable": self.stability.epochs,
            **asdict(self.skips),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for a schedule of the same arguments.

        Raises ValueError that names the missing entries of ``state``.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"state lacks {sorted(missing)}; give what state_dict returned")
        self.epoch = state["epoch"]
        self.stability.best, self.stability.epochs = state["best"], state["stable"]
        self.skips = Skips(*(state[field.name] for field in fields(Skips)))
