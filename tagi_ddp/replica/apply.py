"""The engine's capped update of parameters, on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp import kernels
from tagi_ddp._backend import LEAST_VARIANCE


def move(
    gaussians: Tensor,
    deltas: Tensor,
    negative: Tensor,
    cap: float | Tensor,
    refused: Tensor | None = None,
    floor: float = LEAST_VARIANCE,
) -> None:
    """Add deltas to means and variances, [2, n], by at most sqrt(var) / cap each, as the engine.

    A variance that is not positive becomes ``floor`` and is flagged in ``negative``. Nothing moves
    if ``refused``, a bool on the device, is true.
    """
    if on_gpu := kernels.find(gaussians):
        on_gpu.move(gaussians, deltas, negative, cap, refused, floor)
        return
    variances = gaussians[1]
    bar = variances.sqrt().div_(cap)
    steps = torch.clamp(deltas, bar.neg(), bar)
    if refused is not None:
        steps.masked_fill_(refused, 0)
    gaussians += steps
    torch.le(variances, 0, out=negative)
    variances.masked_fill_(negative, floor)
