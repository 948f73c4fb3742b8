"""Collectives of tensors that are split along any dimension, by communicators' flat buffers.

A buffer holds a tensor's parts, one after the other, each in the memory format that all ranks have
in common. A tensor whose memory has this layout is sent without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tagi_ddp.communicators import Communicator
from tagi_ddp.sharding.groups import Group, Vote, check_dense, communicator, vote
from tagi_ddp.sharding.shapes import Split, whole_of
from tagi_ddp.sharding.utils import get_memory_format

T = TypeVar("T")

_ORDERS = {  # The dimensions, from the outermost in memory to the innermost.
    torch.channels_last: (0, 2, 3, 1),
    torch.channels_last_3d: (0, 2, 3, 4, 1),
}


def apply(
    tensor: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return ``forward(tensor)``; ``backward`` turns its gradient into that of ``tensor``."""
    result: torch.Tensor = _Exchange.apply(tensor, forward, backward)
    return result


def uncompiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function, which torch.compile does not trace."""
    if not torch.compiler.is_compiling():  # The imports of `disable` take a second.
        return function
    disabled: Callable[..., torch.Tensor] = torch.compiler.disable(function)
    return disabled


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, contiguous in the tensor's memory format."""
    check_dense(tensor)
    return tensor.clone(memory_format=get_memory_format(tensor))


def own_part(
    whole: torch.Tensor, split: Split, rank: int, memory_format: torch.memory_format
) -> torch.Tensor:
    """Return a copy of a rank's part."""
    return whole.narrow(*split.slice(rank)).clone(memory_format=memory_format)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor],
        backward: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.exchange = backward
        return forward(tensor.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.exchange(gradient), None, None


class Transport:
    """A communicator, the memory format of data in transit, and that of this rank's results."""

    def __init__(
        self, comm: Communicator, transit: torch.memory_format, own: torch.memory_format
    ) -> None:
        """Keep the arguments; ``transit`` is the same on all ranks."""
        self._comm = comm
        self._transit = transit
        self.own = own

    def gather(self, part: torch.Tensor, split: Split) -> torch.Tensor:
        """Return the whole, of shape ``split.shape``, from every rank's part."""
        source = self._pack(part, whole_of(part.shape))
        target = source.new_empty(sum(split.counts))
        self._run(self._comm.all_gather, source, target, split.counts)
        return self._unpack(target, part, split)

    def reduce_scatter(self, whole: torch.Tensor, split: Split) -> torch.Tensor:
        """Return this rank's part of the sum of every rank's ``whole``."""
        rank = self._comm.rank
        source = self._pack(whole, split)
        target = source.new_empty(split.counts[rank])
        self._run(self._comm.reduce_scatter, source, target, split.counts)
        return self._unpack(target, whole, whole_of(split.part(rank)))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``tensor``."""
        source = self._pack(tensor, whole_of(tensor.shape))
        target = torch.empty_like(source)

        def total(buffer: torch.Tensor, out: torch.Tensor, **options: Any) -> Any:
            return self._comm.all_reduce(buffer, "sum", out=out, **options)

        self._run(total, source, target)
        return self._unpack(target, tensor, whole_of(tensor.shape))

    def all_to_all(self, tensor: torch.Tensor, split: Split, gathered: Split) -> torch.Tensor:
        """Return the parts that all ranks have for this rank, as one tensor.

        ``split`` is the split of this rank's tensor, ``gathered`` that of the result.
        """
        source = self._pack(tensor, split)
        target = source.new_empty(sum(gathered.counts))
        self._run(self._comm.all_to_all, source, target, split.counts, gathered.counts)
        return self._unpack(target, tensor, gathered)

    def _run(
        self,
        operation: Callable[..., Any],
        source: torch.Tensor,
        target: torch.Tensor,
        *counts: Sequence[int],
    ) -> None:
        if source.is_complex():
            counts = tuple([2 * count for count in each] for each in counts)
        args = (_as_sent(source), _as_sent(target), *counts)
        if self._comm.device == "cpu":
            operation(*args)
        else:  # The stream waits, the host does not.
            operation(*args, async_op=True).order()

    def staged(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is sent through the host's memory."""
        return tensor.is_cuda and self._comm.device == "cpu"

    def _order(self, dimensions: int) -> tuple[int, ...]:
        """Return the dimensions in the order that buffers have."""
        return _ORDERS.get(self._transit, tuple(range(dimensions)))

    def _pack(self, tensor: torch.Tensor, split: Split) -> torch.Tensor:
        """Return the parts of ``tensor``, one after the other; without a copy if possible."""
        order = self._order(tensor.dim())
        inner = tensor.resolve_conj().resolve_neg().permute(order)
        if _in_a_row(inner.shape, order, split):
            flat = inner.contiguous().view(-1)
        else:
            flat = inner.new_empty(inner.numel())
            at = order.index(split.dim)
            parts = torch.split(inner, list(split.sizes), at)
            for target, part in zip(_parts(flat, inner.shape, at, split), parts, strict=True):
                target.copy_(part)
        return flat.cpu() if self.staged(tensor) else flat

    def _unpack(self, flat: torch.Tensor, like: torch.Tensor, split: Split) -> torch.Tensor:
        """Return the tensor of which `_pack` would make ``flat``; without a copy if possible.

        It is on the device of ``like``, in this rank's memory format.
        """
        flat = flat.to(like.device)
        order = self._order(len(split.shape))
        inner_shape = [split.shape[dim] for dim in order]
        if _in_a_row(inner_shape, order, split):
            inner = flat.view(inner_shape)
        else:
            at = order.index(split.dim)
            inner = torch.cat(_parts(flat, inner_shape, at, split), at)
        outer = inner.permute([order.index(dim) for dim in range(len(order))])
        return outer.contiguous(memory_format=self.own)


def handshake(
    name: str,
    tensor: torch.Tensor,
    group: Group,
    check: Callable[[], T],
    number: Callable[[], int] = int,
) -> tuple[Transport, Vote[T]]:
    """Return a transport for all ranks' tensors, and the result of their `vote`."""
    result = vote(communicator(group, torch.device("cpu")), name, tensor, check, number)
    return Transport(communicator(group, tensor.device), result.transit, result.own), result


def _as_sent(flat: torch.Tensor) -> torch.Tensor:
    """Return a view that communicators take: bools as bytes, complex numbers as pairs of floats."""
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def _in_a_row(shape: Sequence[int], order: Sequence[int], split: Split) -> bool:
    """Return whether the parts of a contiguous tensor are one after the other in memory."""
    return len(split.sizes) == 1 or math.prod(shape[: order.index(split.dim)]) <= 1


def _parts(flat: torch.Tensor, shape: Sequence[int], at: int, split: Split) -> list[torch.Tensor]:
    """Return views of the parts in ``flat`` of a tensor of ``shape`` that is split along ``at``."""
    return [
        part.view(*shape[:at], size, *shape[at + 1 :])
        for part, size in zip(torch.split(flat, split.counts), split.sizes, strict=True)
    ]
