"""Numbers that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tagi_ddp.communicators.guard import AllRanksRaise


class NotFinite(AllRanksRaise, FloatingPointError, ValueError):
    """NaN or infinite numbers in what all ranks have received."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether no element is NaN or infinite."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors]  # a device need not wait for each
    return all(flag.item() for flag in flags)
