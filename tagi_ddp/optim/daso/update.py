"""A rank's own step in DASO: optimizer, gradient scaler and scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tagi_ddp.optim.daso.finite import NotFinite, all_finite
from tagi_ddp.optim.daso.node import Node


class Update:
    """Steps of the optimizer, by the scaler if there is one, and then of the scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        """Begin without a scaler."""
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler: torch.amp.GradScaler | None = None

    def alone(self) -> None:
        """Step by this rank's own gradients."""
        self._step(self._enabled_scaler())
        self._schedule()

    def together(self, node: Node, all_ranks: bool) -> None:
        """Step by the mean gradients of a node's ranks, which are ``all_ranks`` or not.

        If they are not finite, a scaler skips the step; without one, ``all_ranks`` raise NotFinite.
        """
        scaler = self._enabled_scaler()
        gradients = node.vote()
        if scaler is not None:
            _unscale(scaler, self.optimizer)  # First, because ranks may have different scales.
        node.average(gradients)
        if scaler is not None and not all_finite(gradients):
            scaler.update()
        else:
            if scaler is None and all_ranks and not all_finite(gradients):
                raise NotFinite(
                    "the mean gradient of all ranks is NaN or infinite; no rank has applied it. "
                    "Look at the loss of this batch on all ranks"
                )
            self._step(scaler)
        self._schedule()

    def _step(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def _schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _enabled_scaler(self) -> torch.amp.GradScaler | None:
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizer, scheduler and scaler, None for a missing one."""
        return {
            "local_optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` has another scheduler or scaler, or lacks one."""
        for name, own in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if (own is None) != (state[name] is None):
                has = "none" if state[name] is None else "one"
                raise ValueError(f"state has {has} for {name}: give the same as the saved DASO had")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.optimizer.load_state_dict(state["local_optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    try:
        scaler.unscale_(optimizer)
    except RuntimeError as error:
        if "already been called" not in str(error):  # The caller may have, to clip gradients.
            raise
