"""Collectives over many tensors at once, in contiguous chunks of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, ReduceOp, Work
from tagi_ddp.optim.flat import Flat

LIMIT = 10_000_000
"""The default number of elements of a chunk."""


def mean_in_place(
    tensors: Iterable[Tensor], communicator: Communicator, limit: int = LIMIT
) -> None:
    """Replace every element by its mean over the ranks; a collective call.

    Args:
        tensors: dense, of floats or complex numbers, on any device; in number, shapes and dtypes
            the same on all ranks.
        communicator: of the ranks. What is not on its device is copied there and back.
        limit: the largest number of elements of one reduction, and of memory for each dtype.
            Results do not depend on it, bit for bit, where ranks are added up in their order, as
            all communicators do but NCCL.
    """
    for chunk in _chunks(tensors, communicator, limit):
        buffer = chunk.load()
        if communicator.device == "cpu":
            communicator.all_reduce(buffer, "mean")
        else:  # the device waits, the host need not
            _finish(communicator.all_reduce(buffer, "mean", async_op=True))
        chunk.store()


def broadcast_in_place(
    tensors: Iterable[Tensor], communicator: Communicator, root: int = 0, limit: int = LIMIT
) -> None:
    """Replace every element by that of rank ``root``; a collective call.

    As `mean_in_place`, but of any dtype.
    """
    for chunk in _chunks(tensors, communicator, limit):
        buffer = chunk.load()
        communicator.broadcast(buffer.view(torch.uint8), root)
        chunk.store()


class Reduction:
    """What `start_reduction` has begun."""

    def __init__(self, chunks: list[_Chunk], works: list[Work | None]) -> None:
        """Follow ``works``, one of each chunk."""
        self._chunks = chunks
        self._works = works

    def wait(self) -> None:
        """Let the tensors hold the results; raise the error of what failed.

        On a device only the work behind it waits, not the host.
        """
        while self._works:
            _finish(self._works[0])
            del self._works[0]
            self._chunks.pop(0).store()


def start_reduction(
    tensors: Iterable[Tensor],
    communicator: Communicator,
    op: ReduceOp = "mean",
    limit: int = LIMIT,
) -> Reduction:
    """Begin to reduce every element over the ranks; the tensors change when it is waited for.

    As `mean_in_place`, but the memory is that of all tensors. Leave them alone until then.
    """
    chunks = list(_chunks(tensors, communicator, limit))
    return Reduction(
        chunks, [communicator.all_reduce(chunk.load(), op, async_op=True) for chunk in chunks]
    )


@dataclass
class _Chunk:
    """Slices of flat tensors, which travel as one buffer."""

    device: torch.device  # of the buffer
    pieces: list[Tensor] = field(default_factory=list)
    # Of strided tensors that end here: what the pieces are slices of, and the tensors.
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    buffer: Tensor | None = None

    def load(self) -> Tensor:
        """Return the buffer with what the tensors hold now; a lone piece is its own buffer."""
        if len(self.pieces) == 1 and self.pieces[0].device == self.device:
            return self.pieces[0]
        self.buffer = self._flat().read()
        return self.buffer

    def store(self) -> None:
        """Write the buffer back to the tensors, and free it."""
        if self.buffer is not None:
            self._flat().write(self.buffer)
            self.buffer = None
        for flat, tensor in self.copies:
            if tensor.is_complex():
                tensor.copy_(torch.view_as_complex(flat.view(*tensor.shape, 2)))
            else:
                tensor.copy_(flat.view(tensor.shape))

    def _flat(self) -> Flat:
        return Flat(self.pieces, self.pieces[0].dtype, self.device)


def _chunks(tensors: Iterable[Tensor], communicator: Communicator, limit: int) -> Iterator[_Chunk]:
    """Yield the tensors of each dtype as chunks, in their order; none in a world of one."""
    limit = integer("limit", limit, 1)
    if communicator.size == 1:
        return
    kinds: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise TypeError(f"tensors must be dense, got one of layout {tensor.layout}")
        kinds[tensor.dtype].append(tensor.detach())
    device = torch.device(communicator.device)
    for kind in kinds.values():
        chunk, room = _Chunk(device), limit
        for tensor in kind:
            flat, begin = as_real(tensor.resolve_conj().resolve_neg().contiguous()).view(-1), 0
            while begin < len(flat):
                piece = flat[begin : begin + room]
                chunk.pieces.append(piece)
                begin, room = begin + len(piece), room - len(piece)
                if begin == len(flat) and flat.data_ptr() != tensor.data_ptr():
                    chunk.copies.append((flat, tensor))
                if room == 0:
                    yield chunk
                    chunk, room = _Chunk(device), limit
        if chunk.pieces:
            yield chunk


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of the real numbers of a tensor: of complex ones, pairs of them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _finish(work: Work | None) -> None:
    """Let what comes next have the result: on a device, work put there, else the caller."""
    if work is None:
        return
    if hasattr(work, "order"):
        work.order()
    else:
        work.wait()
