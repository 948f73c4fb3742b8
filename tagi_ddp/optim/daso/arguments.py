"""What DASO is told, and the checks of it: all types before any value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tagi_ddp.checks import integer, real
from tagi_ddp.optim.schedule import SyncSchedule

CASTS = (torch.bfloat16, torch.half, torch.float)


@dataclass(frozen=True)
class Arguments:
    """The arguments of `DASO`, but for the communicator."""

    local_optimizer: torch.optim.Optimizer
    total_epochs: int
    warmup_epochs: int
    cooldown_epochs: int
    scheduler: LRScheduler | None
    stability_level: float
    max_global_skips: int
    sending_chunk_size: int
    downcast_type: torch.dtype
    use_mpi_groups: bool
    skip_reduction_factor: int
    local_skip_factor: int
    verbose: bool
    node_size: int | None
    local_weight: float

    def check_types(self) -> None:
        """Raise TypeError that names the argument and what it got."""
        _check_optimizer(self.local_optimizer)
        for name in (
            "total_epochs",
            "warmup_epochs",
            "cooldown_epochs",
            "max_global_skips",
            "sending_chunk_size",
            "skip_reduction_factor",
            "local_skip_factor",
        ):
            integer(name, getattr(self, name))
        if self.node_size is not None:
            integer("node_size", self.node_size)
        for name in ("stability_level", "local_weight"):
            real(name, getattr(self, name))
        for name in ("use_mpi_groups", "verbose"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not isinstance(self.downcast_type, torch.dtype):
            raise TypeError(f"downcast_type must be a torch.dtype, got {self.downcast_type!r}")
        _check_scheduler(self.scheduler)

    def check_values(self) -> None:
        """Raise ValueError that names the argument and what it got."""
        self.schedule()
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

    def schedule(self) -> SyncSchedule:
        """Return the schedule at its beginning."""
        return SyncSchedule(
            self.total_epochs,
            self.warmup_epochs,
            self.cooldown_epochs,
            self.stability_level,
            self.max_global_skips,
            self.skip_reduction_factor,
            self.local_skip_factor,
        )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"local_optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("local_optimizer must step without a closure, got LBFGS, which needs one")


def _check_scheduler(scheduler: Any) -> None:
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
