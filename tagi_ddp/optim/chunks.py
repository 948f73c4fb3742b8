"""Collectives over many tensors at once, in contiguous chunks of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, ReduceOp, Work

LIMIT = 10_000_000
"""The default number of elements of a chunk."""


def mean_in_place(
    tensors: Iterable[Tensor], communicator: Communicator, limit: int = LIMIT
) -> None:
    """Replace every element by its mean over the ranks; a collective call.

    Args:
        tensors: dense tensors of floats or complex numbers, on any device. Their number, shapes
            and dtypes are the same on all ranks.
        communicator: of the ranks. Tensors on other devices are copied to its device and back.
        limit: the largest number of elements of one reduction, and of the buffer of each dtype.
            Results do not depend on it, bit for bit, except over NCCL: the other communicators
            add in rank order.
    """
    for chunk in _chunks(tensors, communicator, limit):
        on_device = communicator.device != "cpu"  # The device waits, the host does not.
        _finish(communicator.all_reduce(chunk.load(), "mean", async_op=on_device))
        chunk.store()


def broadcast_in_place(
    tensors: Iterable[Tensor], communicator: Communicator, root: int = 0, limit: int = LIMIT
) -> None:
    """Replace every element by that of rank ``root``; a collective call.

    The arguments are those of `mean_in_place`; tensors may have any dtype.
    """
    for chunk in _chunks(tensors, communicator, limit):
        buffer = chunk.load()
        communicator.broadcast(buffer.view(torch.uint8), root)
        chunk.store()


class Reduction:
    """A reduction in progress, from `start_reduction`."""

    def __init__(self, chunks: list[_Chunk], works: list[Work | None]) -> None:
        """Keep ``works``, one for each chunk."""
        self._chunks = chunks
        self._works = works

    def wait(self) -> None:
        """Wait, and write the results to the tensors; raise the error of an operation that failed.

        On a device its later work waits, and the host does not.
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
    """Start to reduce every element over the ranks; `Reduction.wait` writes the results.

    Leave the tensors alone until then. Unlike `mean_in_place`, this has buffers for all of them.
    """
    chunks = list(_chunks(tensors, communicator, limit))
    return Reduction(
        chunks, [communicator.all_reduce(chunk.load(), op, async_op=True) for chunk in chunks]
    )


@dataclass(frozen=True)
class Flat:
    """Tensors, one after the other, as vectors of ``dtype`` on ``device``."""

    tensors: Sequence[Tensor]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return a vector whose elements are not set."""
        size = sum(tensor.numel() for tensor in self.tensors)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def parts(self, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each tensor and its part of the vector, a view in the tensor's shape."""
        parts = torch.split(vector, [tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            yield tensor, part.view(tensor.shape)

    def read(self) -> Tensor:
        """Return a new vector of the tensors' values."""
        vector = self.empty()
        for tensor, part in self.parts(vector):
            part.copy_(tensor.detach())
        return vector

    def write(self, vector: Tensor) -> None:
        """Write the vector to the tensors."""
        for tensor, part in self.parts(vector):
            tensor.detach().copy_(part)


@dataclass
class _Chunk:
    """Slices of flat tensors that are sent as one buffer, which is on ``device``."""

    device: torch.device
    pieces: list[Tensor] = field(default_factory=list)
    # Each strided tensor that ends in this chunk, after the flat copy that the pieces are views of.
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    buffer: Tensor | None = None

    def load(self) -> Tensor:
        """Return the buffer with the tensors' values; a single piece is its own buffer."""
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
    """Return a tensor as real numbers: a complex one as a view of pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _finish(work: Work | None) -> None:
    """Wait for the result: on a device its later work waits, else the caller."""
    if work is None:
        return
    if hasattr(work, "order"):
        work.order()
    else:
        work.wait()
