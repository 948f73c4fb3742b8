"""Collectives of tensors that are split along any dimension, by communicators' flat buffers.

A buffer holds a tensor's parts, one after the other, each in the memory format that all ranks have
in common. A tensor whose memory has this layout is sent without a copy.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.sharding.groups import Group, communicator, rank_and_size
from tagi_ddp.sharding.shapes import Split, whole_of
from tagi_ddp.sharding.utils import get_memory_format

T = TypeVar("T")

_REMEDY = "Make the same calls in the same order with fitting arguments on all ranks."

_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.channels_last_3d}
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


def over_ranks(
    function: Callable[..., torch.Tensor], input_: torch.Tensor, *arguments: Any, mgroup: Group
) -> torch.Tensor:
    """Return ``function(input_, *arguments, mgroup)``; in a group of one, a copy of ``input_``.

    torch.compile does not trace the function.
    """
    if rank_and_size(mgroup)[1] == 1:
        check_dense(input_)
        return input_.clone(memory_format=get_memory_format(input_))
    if torch.compiler.is_compiling():  # The imports of `disable` take a second.
        function = torch.compiler.disable(function)
    return function(input_, *arguments, mgroup)


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
) -> tuple[Transport, T, list[int]]:
    """Compare the ranks' calls; return a transport for all ranks' tensors.

    If ``check`` raises on a rank, or the ranks' calls differ, all ranks raise, before any tensor is
    sent, and the communicator stays usable. This costs one small all-gather.

    Returns:
        the transport, the result of ``check``, which is the same on all ranks, and the results of
        all ranks' ``number``.
    """
    comm = communicator(group, torch.device("cpu"))
    problem: Exception | None = None
    call, formats, favourite, own_number = "", 0, 0, 0
    try:
        check_dense(tensor)
        common, own_number = check(), number()
        call = f"{name}({str(tensor.dtype).removeprefix('torch.')}, {tensor.device.type}, {common})"
        formats, favourite = _formats(tensor)
    except Exception as error:  # No error may keep the others waiting for this rank.
        problem = error
    digest = hashlib.blake2b(call.encode(), digest_size=8).digest()
    code = int.from_bytes(digest, "big", signed=True)
    rows = _gather_rows(comm, [int(problem is not None), code, formats, favourite, own_number])
    if any(row[:2] != [0, code] for row in rows):
        with all_or_none(comm, "the ranks' calls", _REMEDY) as same:
            if problem is not None:
                raise problem
            same("call", call)
    shared = functools.reduce(operator.and_, (row[2] for row in rows))
    transit = next((bit for bit in (rows[0][3], 1, 2, 4) if shared & bit), 1)
    own = transit if formats & transit else favourite
    transport = Transport(communicator(group, tensor.device), _FORMATS[transit], _FORMATS[own])
    return transport, common, [row[4] for row in rows]


def check_dense(tensor: torch.Tensor) -> None:
    """Raise TypeError unless ``tensor`` is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"input_ must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(
            f"input_ must be dense, got a tensor of layout {tensor.layout}: to_dense() makes one"
        )


def _formats(tensor: torch.Tensor) -> tuple[int, int]:
    """Return all formats that the tensor is contiguous in, or will be, and the likeliest, as bits.

    A tensor of a single channel, for example, is contiguous in two; its strides decide.
    """
    bits = sum(bit for bit, f in _FORMATS.items() if tensor.is_contiguous(memory_format=f)) or 1
    usual = bits & 1 and tensor.stride() == _usual_strides(tensor.shape)
    return bits, 1 if usual or bits == 1 else bits & 2 or bits & 4


def _usual_strides(shape: Sequence[int]) -> tuple[int, ...]:
    lengths = [max(length, 1) for length in shape]
    return tuple(math.prod(lengths[i + 1 :]) for i in range(len(lengths)))


def _gather_rows(comm: Communicator, own: list[int]) -> list[list[int]]:
    if comm.device != "cpu":  # Its buffers are on the device; objects do not need them.
        return all_gather_object(comm, own)
    table = np.empty((comm.size, len(own)), np.int64)
    comm.all_gather(np.array(own, np.int64), table)
    rows: list[list[int]] = table.tolist()
    return rows


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
