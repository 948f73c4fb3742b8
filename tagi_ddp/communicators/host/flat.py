"""Collectives in which every rank deals with every other one, by an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.communicators.buffers import HostElements, equal_counts
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.host.engine import Engine
from tagi_ddp.communicators.host.reduce import finish, reduce_rows, widen

FEW = 1024
"""Bytes of a rank that travel with the messages of a handshake."""

_PART = 1 << 26  # bytes all-reduced at a time, which limits the temporary memory
_PIECE = 1 << 23  # bytes that arrive at a time: memory that malloc can use again and again


class Flat:
    """Rank ``rank`` of ``size`` ranks of ``engine``; a handshake brings them together.

    All ranks receive the same bits: numbers are added in the order of the ranks, or the engine's.
    """

    def __init__(self, engine: Engine, rank: int, size: int) -> None:
        self.engine = engine
        self.rank = rank
        self.size = size
        self._apart = self._quick = False

    @property
    def few(self) -> int:
        """Bytes of a rank that messages of the handshake gather no slower than the engine."""
        return 0 if self._quick else FEW

    def set_apart(self, handshake: Handshake) -> None:
        """Let the engine sum, which is faster where each rank is on a host of its own."""
        self._apart, self._quick = True, self.engine.quick
        self.engine.prepare_sums(handshake, 1)

    def meet(self, handshake: Handshake) -> None:
        """Bring all ranks together, as all collectives but `all_to_all` do first."""
        if not self._quick:
            handshake.meet()
            return
        handshake.begin()
        handshake.carry(self.engine.all_reduce(np.zeros(1, np.uint8), "sum", handshake))
        handshake.met()

    def empty(self, handshake: Handshake, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Return zeros: here ranks share no memory, but make their calls alike."""
        self.meet(handshake)
        return np.zeros(shape, dtype)

    def all_reduce(
        self, handshake: Handshake, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        if self._apart:
            self._all_reduce_apart(handshake, source, target, op)
            return
        handshake.meet()
        step = _PART // source.array.itemsize
        for start in range(0, source.count, step):
            part = slice(start, min(start + step, source.count))
            counts = equal_counts(part.stop - start, self.size)
            mine = np.empty(counts[self.rank], source.array.dtype)
            self._scatter(handshake, source.dtype, source.array[part], mine, counts, op)
            handshake.carry(self.engine.all_gather(mine, target.array[part], counts, handshake))

    def _all_reduce_apart(
        self, handshake: Handshake, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        if self.engine.sums_meet:
            handshake.begin()
        else:
            handshake.meet()
        total = widen(source.array, source.dtype)
        if total is source.array:
            total = target.array
            if target.address != source.address:
                total[...] = source.array
        handshake.carry(self.engine.all_reduce(total, op, handshake))
        if self.engine.sums_meet:
            handshake.met()
        result = finish(total, target.dtype, op, self.size)
        if result is not target.array:
            target.array[...] = result

    def reduce_scatter(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        self.meet(handshake)
        self._scatter(handshake, source.dtype, source.array, target.array, counts, op)

    def _scatter(
        self,
        handshake: Handshake,
        dtype: str,
        array: np.ndarray,
        out: np.ndarray,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        """Reduce this rank's slice of ``array`` into ``out``, in rank order."""
        if self.size == 1:
            out[...] = array
            return
        slices = np.split(array, np.cumsum(counts)[:-1])
        step = max(1, _PIECE // (array.itemsize * (self.size - 1)))
        for start in range(0, max(counts), step):
            ready, rows = self.exchange([each[start : start + step] for each in slices], handshake)
            handshake.carry(ready)
            reduce_rows(rows, dtype, op, out[start : start + step], self.size)

    def exchange(
        self, pieces: list[np.ndarray], handshake: Handshake
    ) -> tuple[Ready, list[np.ndarray]]:
        """Begin to send a piece to each rank; return what waits, and what comes, in rank order."""
        own = pieces[self.rank]  # does not travel
        others = pieces[: self.rank] + pieces[self.rank + 1 :]
        sent = [piece.size * (rank != self.rank) for rank, piece in enumerate(pieces)]
        received = [own.size * (rank != self.rank) for rank in range(self.size)]
        rows = np.empty((self.size - 1, own.size), own.dtype)
        there = others[0] if len(others) == 1 else np.concatenate(others)
        ready = self.engine.all_to_all(there, rows.reshape(-1), sent, received, handshake)
        return ready, [*rows[: self.rank], own, *rows[self.rank :]]

    def broadcast(self, handshake: Handshake, data: HostElements, root: int) -> None:
        self.meet(handshake)
        handshake.carry(self.engine.broadcast(data.array, root, handshake))

    def all_gather(
        self, handshake: Handshake, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        self.meet(handshake)
        handshake.carry(self.engine.all_gather(source.array, target.array, counts, handshake))

    def gather_rows(self, handshake: Handshake, row: np.ndarray) -> np.ndarray:
        """Return the rows of all ranks, which are alike in length."""
        rows = np.empty((self.size, row.size), row.dtype)
        counts = [row.size] * self.size
        handshake.carry(self.engine.all_gather(row, rows.reshape(-1), counts, handshake))
        return rows

    def all_to_all(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        sent: list[int],
        received: list[int],
    ) -> None:
        handshake.carry(
            self.engine.all_to_all(source.array, target.array, sent, received, handshake)
        )
