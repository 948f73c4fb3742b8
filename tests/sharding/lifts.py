"""From one process's variable to the ranks' parts and back, to check gradients by differences."""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor


def spread(part: Tensor, whole: Tensor, comm: Any) -> Tensor:
    """Return ``part`` of ``whole``, which all ranks have; its gradient is that of all parts."""
    return _Spread.apply(whole, part.detach(), lambda own: _vjp(part, whole, own, comm))


def _vjp(part: Tensor, whole: Tensor, gradient: Tensor, comm: Any) -> Tensor:
    with torch.enable_grad():
        (own,) = torch.autograd.grad(part, whole, gradient, retain_graph=True)
    return comm_sum(own.contiguous(), comm)


def comm_sum(tensor: Tensor, comm: Any) -> Tensor:
    if tensor.is_complex():
        pairs = torch.view_as_real(tensor.resolve_conj())
        return torch.view_as_complex(comm_sum(pairs, comm))
    out = torch.empty_like(tensor)
    comm.all_reduce(tensor, out=out)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, back: Any) -> Tensor:
        ctx.back = back
        return part.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def joined(own: Tensor, shapes: list[list[int]], dim: int, comm: Any) -> Tensor:
    """Return all ranks' results, joined along ``dim``; the own part's gradient is its slice."""
    return _Joined.apply(own, shapes, dim, comm)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shapes: list[list[int]], dim: int, comm: Any) -> Tensor:
        ctx.split = [shape[dim] for shape in shapes], dim, comm.rank
        counts = [math.prod(shape) for shape in shapes]
        flat = own.new_empty(sum(counts))
        comm.all_gather(own.contiguous(), flat, counts)
        parts = flat.split(counts)
        return torch.cat([part.view(s) for part, s in zip(parts, shapes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sizes, dim, rank = ctx.split
        return gradient.split(sizes, dim)[rank], None, None, None
