"""Sums of changes, damped where ranks agree, on tensors; see cpp_backend/update/adaptive_sum.h."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp._backend import AdaptiveSum
from tagi_ddp.replica.device_parameters import DeviceParameters


class DeviceAdaptiveSum:
    """What `_backend.AdaptiveSum` does, on flat tensors."""

    def __init__(self, parameters: DeviceParameters) -> None:
        length = AdaptiveSum.BLOCK
        # (begin, whole blocks, parameters that are left) of each run of weights or biases
        self._runs = [(begin, *divmod(count, length)) for begin, count in parameters.blocks]
        counts = [[length] * whole + [rest] * (rest > 0) for _, whole, rest in self._runs]
        pairs = zip(counts[::2], counts[1::2], strict=True)  # weights, biases
        self._layers = [len(weights) + len(biases) for weights, biases in pairs]
        device = parameters.mu.device
        self._counts = torch.tensor([n for run in counts for n in run], device=device)
        blocks = len(self._counts)
        self.described = blocks + 1
        self.previous = torch.zeros_like(parameters.mu)
        self.trust = torch.ones(blocks, dtype=torch.float64, device=device)

    def describe(self, change: Tensor, before: Tensor, steps: float, description: Tensor) -> None:
        """Describe a rank's change in so many steps since ``before``."""
        weighted = change.chunk(2)[1]
        description[:-1].copy_(self._product(weighted, weighted, before.chunk(2)[1]))
        description[-1] = steps

    def damp(self, change: Tensor, before: Tensor, description: Tensor, ranks: int) -> list[float]:
        """Damp the sum of the ranks' changes; return the agreement by layer."""
        precision, weighted = change.chunk(2)
        variances = before.chunk(2)[1]
        total, last = (self._product(w, w, variances) for w in (weighted, self.previous))
        every, single = description[:-1].double(), description[-1] <= ranks
        ratio = torch.where(every > 0, total / every, 0.0)
        alike = ((ratio - 1) / max(1, ranks - 1)).clamp(0, 1)
        alike = torch.where(torch.isfinite(every), alike, 1.0)
        grown = self._product(precision, variances, torch.ones_like(variances)).clamp(min=0)
        counts = torch.where(every > 0, 1 / (1 + (AdaptiveSum.SURPRISE * grown / every) ** 4), 0.0)
        counts = torch.where(torch.isfinite(every), counts, 1.0)
        along = self._product(weighted, self.previous, variances)
        turns = ~single & (total > 0) & (last > 0)
        turn = along / (total.sqrt() * last.sqrt()) + AdaptiveSum.LEEWAY
        trust = (self.trust + torch.where(turn > 0, AdaptiveSum.REGAINED * turn, turn)).clamp(0, 1)
        self.trust = torch.where(turns, trust, self.trust)
        trusted = torch.where(single, 1.0, self.trust)
        back = torch.where(turns, (along / last).clamp(max=0), 0.0)
        back = (back * back / (1 - back)).float().repeat_interleave(self._counts)
        finite = torch.where(torch.isfinite(weighted), weighted, 0.0)
        weighted.addcmul_(back, self.previous)
        self.previous = finite
        precision *= self._part((ranks - 1) * counts * (1 - trusted * (1 - alike)))
        weighted *= self._part((ranks - 1) * (1 - trusted * (1 - counts * alike)))
        layers = zip(alike.split(self._layers), self._counts.split(self._layers), strict=True)
        return [float((c * n).sum() / n.sum()) if len(n) else 0.0 for c, n in layers]

    def restart(self) -> None:
        """Forget the sums before."""
        self.previous.zero_()
        self.trust.fill_(1)

    def _part(self, priors: Tensor) -> Tensor:
        """Return, for each parameter, what is taken in."""
        return (1 / (1 + priors)).float().repeat_interleave(self._counts)

    def _product(self, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        """Return of each block the sum of a * b * scale, in one order."""
        values = a.double() * b * scale
        values = torch.where(values.abs() <= 1e300, values, 0.0)
        parts = []
        for begin, whole, rest in self._runs:
            end = begin + whole * AdaptiveSum.BLOCK
            parts.append(values[begin:end].view(whole, -1).sum(1) if whole else values[:0])
            parts.append(values[end : end + rest].sum(0, keepdim=True)[: rest > 0])
        return torch.cat(parts)
