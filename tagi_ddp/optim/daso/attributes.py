"""What DASO shows of itself: its settings, and where it is in the training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator
from tagi_ddp.optim.daso.arguments import Arguments
from tagi_ddp.optim.daso.ranks import Ranks
from tagi_ddp.optim.daso.update import Update
from tagi_ddp.optim.schedule import SyncSchedule


class Attributes:
    """The public attributes of `DASO`."""

    _ranks: Ranks
    _schedule: SyncSchedule
    _update: Update

    def __init__(self, arguments: Arguments) -> None:
        """Show the arguments."""
        self.total_epochs = arguments.total_epochs
        self.warmup_epochs = arguments.warmup_epochs
        self.cooldown_epochs = arguments.cooldown_epochs
        self.max_gs = arguments.max_global_skips
        self.cast_dtype = arguments.downcast_type
        self.skip_reduction_factor = arguments.skip_reduction_factor
        self.local_skip_factor = arguments.local_skip_factor
        self.verbose = arguments.verbose
        self._last_batch: int | None = None

    @property
    def comm(self) -> Communicator:
        """All ranks."""
        return self._ranks.world

    @property
    def loc_gpus(self) -> int:
        """The number of ranks of a node, each with its GPU if there are any."""
        return self._ranks.levels.node.size

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps this rank's parameters."""
        return self._update.optimizer

    @property
    def params_ref(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return [p for group in self.local_optimizer.param_groups for p in group["params"]]

    @property
    def scheduler(self) -> LRScheduler | None:
        """What steps the learning rate after each batch."""
        return self._update.scheduler

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._schedule.epoch

    @property
    def global_skip(self) -> int:
        """Batches from one exchange between nodes to the next; 0: after each, and all wait."""
        return self._schedule.skips.global_skip if self._cycling else 0

    @property
    def local_skip(self) -> int:
        """Batches from one synchronization of a node's ranks to the next."""
        return self._schedule.skips.local_skip if self._cycling else 1

    @property
    def batches_to_wait(self) -> int:
        """Batches after which a sent copy is merged; 0: all wait for it."""
        return self._schedule.skips.batches_to_wait if self._cycling else 0

    @property
    def _cycling(self) -> bool:
        return self._schedule.phase == "cycling"

    @property
    def last_batch(self) -> int | None:
        """The number of batches of an epoch, the same on all ranks; None until it is set."""
        return self._last_batch

    @last_batch.setter
    def last_batch(self, batches: int | None) -> None:
        self._last_batch = None if batches is None else integer("last_batch", batches, 1)

    @property
    def amp(self) -> bool:
        """Whether there is a gradient scaler."""
        return self._update.scaler is not None

    def print0(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, if ``verbose`` is set."""
        if self.verbose and self.comm.rank == 0:
            print(*args, **kwargs)
