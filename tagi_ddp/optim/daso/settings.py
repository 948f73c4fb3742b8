"""The arguments of DASO, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tagi_ddp.checks import integer, real
from tagi_ddp.communicators import Communicator, init
from tagi_ddp.communicators.equality import Same
from tagi_ddp.communicators.init import adopted
from tagi_ddp.optim.schedule import SyncSchedule

CASTS = (torch.bfloat16, torch.half, torch.float)


@dataclass(eq=False, repr=False)
class Settings:
    """The arguments of `DASO`, in their order; `DASO` describes them.

    Raises:
        TypeError, ValueError: naming the argument and what it got; all types are checked before
            any value.
    """

    local_optimizer: torch.optim.Optimizer
    total_epochs: int
    comm: Any = None
    warmup_epochs: int = 4
    cooldown_epochs: int = 4
    scheduler: LRScheduler | None = None
    stability_level: float = 0.05
    max_global_skips: int = 8
    sending_chunk_size: int = 10_000_000
    downcast_type: torch.dtype = torch.bfloat16
    use_mpi_groups: bool = True
    skip_reduction_factor: int = 2
    local_skip_factor: int = 4
    verbose: bool = False
    node_size: int | None = field(default=None, kw_only=True)
    local_weight: float = field(default=2.0, kw_only=True)

    def compare(self, same: Same) -> None:
        """Check all but ``comm``; compare those that must be the same on all ranks."""
        Settings.__post_init__(self)
        same("scheduler", None if self.scheduler is None else type(self.scheduler).__name__)
        own = ("local_optimizer", "comm", "scheduler", "use_mpi_groups", "verbose")
        for each in fields(Settings):
            if each.name not in own:
                same(each.name, getattr(self, each.name))

    @property
    def max_gs(self) -> int:
        """``max_global_skips``."""
        return self.max_global_skips

    @property
    def cast_dtype(self) -> torch.dtype:
        """``downcast_type``."""
        return self.downcast_type

    @property
    def split_val(self) -> int:
        """``sending_chunk_size``."""
        return self.sending_chunk_size

    def __post_init__(self) -> None:
        """Check all but ``comm``; `SyncSchedule` checks its own."""
        _check_optimizer(self.local_optimizer)
        _check_scheduler(self.scheduler)
        integer("sending_chunk_size", self.sending_chunk_size)
        if self.node_size is not None:
            integer("node_size", self.node_size)
        real("local_weight", self.local_weight)
        for name in ("use_mpi_groups", "verbose"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not isinstance(self.downcast_type, torch.dtype):
            raise TypeError(f"downcast_type must be a torch.dtype, got {self.downcast_type!r}")
        self._new_schedule()  # It checks the last types, and the first values.
        integer("sending_chunk_size", self.sending_chunk_size, 1)
        if self.node_size is not None:
            integer("node_size", self.node_size, 1)
        if self.downcast_type not in CASTS:
            names = ", ".join(map(str, CASTS))
            raise ValueError(f"downcast_type must be one of {names}, got {self.downcast_type}")
        if not 0 <= self.local_weight < math.inf:
            raise ValueError(f"local_weight must be 0 or more, got {self.local_weight}")
        if self.scheduler is not None and self.scheduler.optimizer is not self.local_optimizer:
            raise ValueError(
                f"scheduler must be one of local_optimizer, got one of {self.scheduler.optimizer!r}"
            )

    def _new_schedule(self) -> SyncSchedule:
        """Return the schedule at its beginning."""
        return SyncSchedule(**self.of_schedule)

    @property
    def of_schedule(self) -> dict[str, Any]:
        """The arguments of `SyncSchedule`, by name."""
        return {name: getattr(self, name) for name in signature(SyncSchedule).parameters}


def check_same(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError that names the first difference of a state's settings from ``own``."""
    for name in {**saved, **own}:
        before, now = saved.get(name, "none"), own.get(name, "none")
        if before != now:
            raise ValueError(
                f"state has {name}: {before}, this DASO {now}; give the same arguments, and the "
                "same model to DataParallelMultiGPU or set_model"
            )


def adopt(comm: Any, made: ExitStack) -> Communicator:
    """Return ``comm`` as a communicator; None: a new one. ``made`` closes what is connected."""
    if comm is None:
        return made.enter_context(init())
    try:
        return made.enter_context(adopted(comm))
    except TypeError:
        raise TypeError(
            "comm must be a communicator, a torch.distributed.ProcessGroup or one of mpi4py, got "
            f"{comm!r}"
        ) from None


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"local_optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("local_optimizer must step without a closure, got LBFGS, which needs one")


def _check_scheduler(scheduler: object) -> None:
    if scheduler is None:
        return
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler, got {scheduler!r}"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "scheduler must step without a metric, got ReduceLROnPlateau: step it yourself"
        )
