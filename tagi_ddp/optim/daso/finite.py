"""Numbers that must be finite: what ranks exchange, and the mean of their losses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.checks import real
from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.guard import AllRanksRaise


class NotFinite(AllRanksRaise, FloatingPointError, ValueError):
    """NaN or infinite numbers in data that all ranks have received."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no element is NaN or infinite."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors]  # The host waits only once.
    return all(flag.item() for flag in flags)


def average_loss(communicator: Communicator, loss: Any, averaged: Any) -> float:
    """Return the mean of the ranks' losses, or rank 0's if they are ``averaged`` already.

    Raises TypeError or ValueError if ``loss`` is no number, and NotFinite, on all ranks, if the
    mean is NaN or infinite.
    """
    if not isinstance(averaged, bool):
        raise TypeError(f"loss_globally_averaged must be a bool, got {averaged!r}")
    shared = torch.tensor([_number(loss)], dtype=torch.float64, device=communicator.device)
    if averaged:
        communicator.broadcast(shared)  # The ranks' may differ in the last bits.
    else:
        communicator.all_reduce(shared, "mean")
    average: float = shared.item()
    if not math.isfinite(average):
        raise NotFinite(f"the loss of all ranks is {average}: look at each rank's")
    return average


def _number(loss: Any) -> float:
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(f"loss must be one number, got a tensor of shape {tuple(loss.shape)}")
        loss = loss.item()
    return real("loss", loss)
