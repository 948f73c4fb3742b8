"""The mean of one vector a rank in few bits, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator, Work
from tagi_ddp.communicators.buffers import equal_counts


@dataclass
class Residual:
    """What casting has dropped on this rank, and is sent the next time: error feedback.

    own: of its vectors, all elements. share: of the means that it computes for all, in the order of
    its slices. Both have the units of the vectors, which do not change from one to the next.
    """

    own: Tensor
    share: Tensor

    def mixed(self, newer: Residual, weight: float) -> Residual:
        """Return this with so much weight, ``newer`` with the rest."""
        return Residual(
            torch.lerp(newer.own, self.own, weight), torch.lerp(newer.share, self.share, weight)
        )


@dataclass
class _Chunk:
    """A part of the vector; every rank computes the mean of its slice of it."""

    mean: Tensor  # of all ranks' slices
    counts: list[int]  # elements of each rank's slice
    share: slice  # of this rank's elements of `Residual.share`
    rows: Tensor  # this rank's slice of every rank's vector
    work: Work | None


class CompressedMean:
    """The mean over all ranks of their vectors, in flight from the beginning.

    Ranks send slices of their vectors, cast to ``dtype``, to those that average them in full
    precision, and these send the mean, cast again, to all: so all have the same bits, each rank
    sends two vectors of ``dtype`` however many ranks there are, and a sum is not rounded at each
    addition. What both casts drop is kept in ``residual``, and added to the next vector: error
    feedback as of Tang et al. 2019, "DoubleSqueeze" (arXiv:1905.06957).

    ``mean`` and ``residual`` hold what they should once `finish` has returned.

    Args:
        vector: floats, the same number on all ranks; it is left alone.
        residual: what was dropped before; None if ``dtype`` is the vector's, and nothing is.
        communicator: of the ranks.
        dtype: of what is sent.
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
        """Send the means of what is complete, without waiting for more."""
        while self._unread and _done(self._unread[0].work):
            self._average(self._unread.pop(0))

    def finish(self) -> None:
        """Wait until all are complete; returns at once when called again."""
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
        chunk.rows = cast  # whose memory is in use until all have it
        chunk.work = self._communicator.all_gather(cast, chunk.mean, chunk.counts, async_op=True)


def no_residual(vector: Tensor, communicator: Communicator, limit: int) -> Residual:
    """Return the residual before the first mean of such vectors."""
    rank, ranks = communicator.rank, communicator.size
    shares = [equal_counts(part.numel(), ranks)[rank] for part in torch.split(vector, limit)]
    return Residual(torch.zeros_like(vector), vector.new_zeros(sum(shares)))


def _done(work: Work | None) -> bool:
    return work is None or work.done()


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()
