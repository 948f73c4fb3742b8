"""Tensors split along any dimension, over communicators, whose buffers are flat.

On the way a tensor's parts lie one after the other, each in the order of the memory format that
the ranks agreed on. Where a tensor's memory is like that already, it travels without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from tagi_ddp.communicators import Communicator
from tagi_ddp.sharding.groups import Agreed, agree, communicator
from tagi_ddp.sharding.shapes import Split
from tagi_ddp.sharding.utils import get_memory_format

T = TypeVar("T")

_ORDERS = {  # the dimensions from the outermost in memory to the innermost
    torch.channels_last: (0, 2, 3, 1),
    torch.channels_last_3d: (0, 2, 3, 4, 1),
}


def apply(
    tensor: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return ``forward(tensor)``, whose gradient is ``backward`` of the gradient that comes."""
    return _Exchange.apply(tensor, forward, backward)


def uncompiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function as torch.compile, if it looks, must take it: as it is."""
    # torch.compiler.disable takes a second to import what it needs.
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, contiguous in the tensor's memory format."""
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


class Wire:
    """A communicator, and the memory formats of what travels over it and of what comes out."""

    def __init__(
        self, comm: Communicator, wire: torch.memory_format, own: torch.memory_format
    ) -> None:
        """Remember them; ``wire`` is the same on all ranks."""
        self._comm = comm
        self._wire = wire
        self.own = own

    def gather(self, part: torch.Tensor, split: Split) -> torch.Tensor:
        """Return the whole, of shape ``split.shape``, from every rank's part."""
        source = self._pack(part, split.dim, [part.shape[split.dim]])
        target = _Arrival(self, part, split.shape, split.dim, split.sizes)
        self._run(self._comm.all_gather, source, target.flat, target.counts)
        return target.tensor()

    def reduce_scatter(self, whole: torch.Tensor, split: Split) -> torch.Tensor:
        """Return this rank's part of the sum of every rank's ``whole``."""
        rank = self._comm.rank
        source = self._pack(whole, split.dim, split.sizes)
        target = _Arrival(self, whole, split.part(rank), split.dim, [split.sizes[rank]])
        self._run(
            self._comm.reduce_scatter,
            source,
            target.flat,
            _counts(split.shape, split.dim, split.sizes),
        )
        return target.tensor()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``tensor``."""
        flat = tensor.reshape(-1) if tensor.dim() == 0 else tensor
        source = self._pack(flat, 0, [flat.shape[0]])
        target = _Arrival(self, tensor, flat.shape, 0, [flat.shape[0]])
        self._run(self._comm.all_reduce, source, "sum", out=target.flat)
        return target.tensor().view(tensor.shape)

    def all_to_all(self, tensor: torch.Tensor, split: Split, joined: Split) -> torch.Tensor:
        """Return the parts for this rank of every rank's tensor, put together.

        ``split`` says how this rank's tensor is split, ``joined`` how what it returns is.
        """
        rank = self._comm.rank  # whose own part stays
        source = self._pack(tensor, split.dim, split.sizes, rank)
        target = _Arrival(self, tensor, joined.shape, joined.dim, joined.sizes, rank)
        sent = _counts(split.shape, split.dim, split.sizes, rank)
        self._run(self._comm.all_to_all, source, target.flat, sent, target.counts)
        out = target.tensor()
        out.narrow(*joined.slice(rank)).copy_(tensor.narrow(*split.slice(rank)))
        return out

    def _run(self, operation: Callable[..., Any], *args: Any, **options: Any) -> None:
        if self._comm.device == "cpu":
            operation(*args, **options)
        else:  # the stream waits, the host does not
            operation(*args, **options, async_op=True).order()

    def staged(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor must go by way of the host."""
        return tensor.is_cuda and self._comm.device == "cpu"

    def inner(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view with the dimensions in the order in which they travel."""
        return tensor.permute(_ORDERS.get(self._wire, tuple(range(tensor.dim()))))

    def at(self, dim: int) -> int:
        """Return where in that order ``dim`` is."""
        return _ORDERS[self._wire].index(dim) if self._wire in _ORDERS else dim

    def empty(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return memory for what comes out."""
        return torch.empty(
            tuple(shape), dtype=like.dtype, device=like.device, memory_format=self.own
        )

    def _pack(
        self, tensor: torch.Tensor, dim: int, sizes: Sequence[int], absent: int | None = None
    ) -> torch.Tensor:
        """Return the parts of ``tensor``, one after the other, without a copy if they lie so.

        That of rank ``absent`` is left out.
        """
        inner, at = self.inner(tensor), self.at(dim)
        place = "cpu" if self.staged(tensor) else None
        if _in_a_row(inner, at, sizes):
            flat = _without(inner.contiguous().view(-1), _counts(inner.shape, at, sizes), absent)
            if flat is not None:
                return flat.cpu() if place else flat
        flat = inner.new_empty(sum(_counts(inner.shape, at, sizes, absent)), device=place)
        _copy_parts(inner, at, sizes, absent, flat, lambda part, there: there.copy_(part))
        return flat


def meet(
    name: str,
    tensor: torch.Tensor,
    group: Communicator | ProcessGroup,
    check: Callable[[], T],
    number: Callable[[], int] = int,
) -> tuple[Wire, Agreed[T]]:
    """Return a wire for all ranks' tensors, and what the ranks have agreed on; see `agree`."""
    agreed = agree(communicator(group, torch.device("cpu")), name, tensor, check, number)
    return Wire(communicator(group, tensor.device), agreed.wire, agreed.own), agreed


class _Arrival:
    """Memory for the parts of a tensor, one after the other, and the tensor made of them."""

    def __init__(
        self,
        wire: Wire,
        like: torch.Tensor,
        shape: Sequence[int],
        dim: int,
        sizes: Sequence[int],
        absent: int | None = None,
    ) -> None:
        """Make room for the parts of ``sizes``, but for that of rank ``absent``."""
        self.counts = _counts(shape, dim, sizes, absent)
        self._out = wire.empty(like, shape)
        self._inner, self._at = wire.inner(self._out), wire.at(dim)
        self._sizes, self._absent = sizes, absent
        staged = wire.staged(like)
        flat = None
        if _in_a_row(self._inner, self._at, sizes) and self._inner.is_contiguous() and not staged:
            flat = _without(self._inner.view(-1), _counts(shape, dim, sizes), absent)
        self._direct = flat is not None
        self.flat = (
            like.new_empty(sum(self.counts), device="cpu" if staged else None)
            if flat is None
            else flat
        )

    def tensor(self) -> torch.Tensor:
        """Return the tensor, once the parts are there."""
        if not self._direct:
            _copy_parts(
                self._inner,
                self._at,
                self._sizes,
                self._absent,
                self.flat,
                lambda part, there: part.copy_(there),
            )
        return self._out


def _in_a_row(inner: torch.Tensor, at: int, sizes: Sequence[int]) -> bool:
    """Tell whether the parts of a contiguous tensor lie one after the other."""
    return len(sizes) == 1 or math.prod(inner.shape[:at]) <= 1


def _counts(
    shape: Sequence[int], dim: int, sizes: Sequence[int], absent: int | None = None
) -> list[int]:
    """Return the number of elements of each part, 0 for that of rank ``absent``."""
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return [size * rest if rank != absent else 0 for rank, size in enumerate(sizes)]


def _without(flat: torch.Tensor, counts: list[int], absent: int | None) -> torch.Tensor | None:
    """Return ``flat`` without the part of rank ``absent``, unless that lies in the middle."""
    if absent is None:
        return flat
    start = sum(counts[:absent])
    stop = start + counts[absent]
    if start == 0:
        return flat[stop:]
    return flat[:start] if stop == flat.numel() else None


def _copy_parts(
    inner: torch.Tensor,
    at: int,
    sizes: Sequence[int],
    absent: int | None,
    flat: torch.Tensor,
    copy: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    start = 0
    for rank, part in enumerate(inner.split(list(sizes), at)):
        if rank != absent:
            copy(part, flat.narrow(0, start, part.numel()).view(part.shape))
            start += part.numel()
