"""The engine's capped update of parameters, on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp._backend import LEAST_VARIANCE


def move(
    mu: Tensor,
    var: Tensor,
    delta_mu: Tensor,
    delta_var: Tensor,
    cap: float | Tensor,
    where: Tensor | None,
    floor: float = LEAST_VARIANCE,
) -> Tensor:
    """Move means and variances by their deltas, by sqrt(var) / cap at most; as the engine.

    A variance that is not positive becomes ``floor``; returns which did. Nothing moves unless
    ``where``, a bool, holds.
    """
    bar = var.sqrt().div_(cap)
    if where is not None:
        bar = torch.where(where, bar, torch.zeros_like(bar))
        delta_mu = torch.where(where, delta_mu, torch.zeros_like(delta_mu))
        delta_var = torch.where(where, delta_var, torch.zeros_like(delta_var))
    mu += torch.minimum(torch.maximum(delta_mu, -bar), bar)
    var += torch.minimum(torch.maximum(delta_var, -bar), bar)
    negative = var <= 0
    var.masked_fill_(negative, floor)
    return negative
