"""Merging posteriors by Bayes' rule, on tensors; cpp_backend/update/merge.h has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp._backend import LEAST_PRECISION_KEPT


def change_since(now: Tensor, before: Tensor, change: Tensor) -> None:
    """Write how Gaussians, [means | variances], came from others: [precisions | weighted means]."""
    mean, variance = now.double().chunk(2)
    mean0, variance0 = before.double().chunk(2)
    precision, weighted = change.chunk(2)
    precision.copy_((variance0 - variance) / (variance * variance0))
    weighted.copy_((mean - mean0) / variance)


def add_change(gaussians: Tensor, reference: Tensor, change: Tensor, own: Tensor | None) -> Tensor:
    """Multiply ``gaussians`` by ``change`` less ``own``, relative to the means of ``reference``.

    Returns which parameters took only a part of it, so that enough of their precision is kept, or
    nothing, where it is not finite.
    """
    total = change.double() if own is None else change.double() - own.double()
    precision, weighted = total.chunk(2)
    mean, variance = gaussians.double().chunk(2)
    finite = torch.isfinite(precision) & torch.isfinite(weighted)
    precision, weighted = precision.where(finite, 0.0), weighted.where(finite, 0.0)
    relative = precision * variance
    guarded = 1 + relative <= LEAST_PRECISION_KEPT
    excess = torch.where(guarded, -relative / (1 - LEAST_PRECISION_KEPT), 1.0)
    part = torch.where(guarded, 0.5 ** (excess.log2().floor() + 1), 1.0)
    after = variance / (1 + part * relative)
    step = weighted + precision * (reference.chunk(2)[0].double() - mean)
    into_mean, into_variance = gaussians.chunk(2)
    into_mean.copy_(mean + part * step * after)
    into_variance.copy_(after).clamp_(min=torch.finfo(torch.float32).tiny)
    return guarded | ~finite
