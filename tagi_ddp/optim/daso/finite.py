"""Numbers that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tagi_ddp.communicators.guard import AllRanksRaise


class NotFinite(AllRanksRaise, FloatingPointError, ValueError):
    """NaN or infinite numbers in data that all ranks have received."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no element is NaN or infinite."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors]  # The host waits only once.
    return all(flag.item() for flag in flags)
