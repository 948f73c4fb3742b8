"""The mean of the ranks' vectors, sent in few bits, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator, Work
from tagi_ddp.communicators.buffers import equal_counts


@dataclass
class Residual:
    """The errors of casting on this rank, which are added to the next vector: error feedback.

    own: of its whole vector. share: of the means that it computes for all ranks, in the order of
    its slices. Both have the units of the vectors, which are the same for all vectors.
    """

    own: Tensor
    share: Tensor

    def mixed(self, newer: Residual, weight: float) -> Residual:
        """Return the mean of this with ``weight`` and ``newer`` with 1 - ``weight``."""
        return Residual(
            torch.lerp(newer.own, self.own, weight), torch.lerp(newer.share, self.share, weight)
        )


@dataclass
class _Chunk:
    """A part of the vector; each rank computes the mean of one slice of it."""

    mean: Tensor  # The means of all slices.
    counts: list[int]  # The number of elements of each rank's slice.
    share: slice  # This chunk's elements of `Residual.share`.
    rows: Tensor  # This rank's slice of every rank's vector.
    work: Work | None


class CompressedMean:
    """The mean of all ranks' vectors, in flight from the beginning.

    Each rank sends slices of its vector, cast to ``dtype``, to the ranks that average them. Those
    add in full precision, which does not round at each addition, and send the mean, cast again, to
    all: all have the same bits. Each rank sends two vectors of ``dtype`` at any number of ranks.
    The errors of both casts are kept in ``residual`` and added to the next vector: error feedback
    as of Tang et al. 2019, "DoubleSqueeze" (arXiv:1905.06957).

    ``mean`` and ``residual`` are complete once `finish` has returned.

    Args:
        vector: floats, the same number on all ranks; it is left alone.
        residual: that of the last mean; None if ``dtype`` is the vector's, and nothing is cast.
        communicator: of the ranks.
        dtype: of the data that is sent.
        limit: the largest number of elements of one operation.
    """

    def __init__(
        self,
        vector: Tensor,
        residual: Residual | None,
        communicator: Communicator,
        dtype: torch.dtype,
        limit: int,
    ) -> None:
        """Send the slices; a collective call."""
        self._communicator = communicator
        self._full = vector.dtype
        self._old = residual
        whole = vector if residual is None else vector + residual.own
        cast = whole.to(dtype)
        self.residual = (
            None if residual is None else Residual(whole - cast, torch.empty_like(residual.share))
        )
        self._sent = cast.to(communicator.device)
        self.mean = torch.empty_like(self._sent)
        self._chunks = self._send(limit)
        self._unread = list(self._chunks)

    def _send(self, limit: int) -> list[_Chunk]:
        rank, ranks = self._communicator.rank, self._communicator.size
        chunks, done = [], 0
        for sent, mean in zip(
            torch.split(self._sent, limit), torch.split(self.mean, limit), strict=True
        ):
            counts = equal_counts(sent.numel(), ranks)
            own = counts[rank]
            rows = sent.new_empty(ranks * own)
            work = self._communicator.all_to_all(sent, rows, counts, [own] * ranks, async_op=True)
            chunks.append(_Chunk(mean, counts, slice(done, done + own), rows, work))
            done += own
        return chunks

    def progress(self) -> None:
        """Send the means of the chunks that have arrived, without waiting."""
        while self._unread and _done(self._unread[0].work):
            self._average(self._unread.pop(0))

    def finish(self) -> None:
        """Wait until all chunks are complete; return at once when called again."""
        while self._unread:
            self._average(self._unread.pop(0))
        while self._chunks:
            _wait(self._chunks[0].work)
            del self._chunks[0]

    def _average(self, chunk: _Chunk) -> None:
        _wait(chunk.work)
        ranks = self._communicator.size
        mean = (
            chunk.rows.view(ranks, chunk.counts[self._communicator.rank]).to(self._full).sum(0)
            / ranks
        )
        if self._old is not None:
            mean += self._old.share[chunk.share].to(mean.device)
        cast = mean.to(self.mean.dtype)
        if self.residual is not None:
            self.residual.share[chunk.share] = (mean - cast).to(self.residual.share.device)
        chunk.rows = cast  # The all_gather uses this memory.
        chunk.work = self._communicator.all_gather(cast, chunk.mean, chunk.counts, async_op=True)


def no_residual(vector: Tensor, communicator: Communicator, limit: int) -> Residual:
    """Return the residual before the first mean of such vectors: zeros."""
    rank, ranks = communicator.rank, communicator.size
    shares = [equal_counts(part.numel(), ranks)[rank] for part in torch.split(vector, limit)]
    return Residual(torch.zeros_like(vector), vector.new_zeros(sum(shares)))


def _done(work: Work | None) -> bool:
    return work is None or work.done()


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()
