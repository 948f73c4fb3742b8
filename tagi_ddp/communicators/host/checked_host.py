"""Communicators that let the engine start when all ranks have come and their calls fit.

The engine only ever copies bytes: reductions are done here, each element on one rank, so that all
get the same bits.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from tagi_ddp.communicators.buffers import HostElements, elements, equal_counts
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.checked import CheckedCommunicator
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.errors import Mismatch
from tagi_ddp.communicators.host.reduce import reduce_rows

_PART = 1 << 26  # bytes all-reduced at a time, which limits the temporary memory
_PIECE = 1 << 23  # bytes that arrive at a time: memory that malloc can use again and again


class CheckedHostCommunicator(CheckedCommunicator[HostElements, None]):
    """A rank whose collectives start with a handshake of all; a subclass adds the engine."""

    _elements = staticmethod(elements)

    # The engine copies flat arrays of one dtype; its methods are called alike on all ranks.

    @abstractmethod
    def _engine_broadcast(self, array: np.ndarray, root: int, limit: float) -> Ready: ...

    @abstractmethod
    def _engine_all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Ready: ...

    @abstractmethod
    def _engine_all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        limit: float,
    ) -> Ready: ...

    # Operations.

    def _all_reduce(
        self, call: Call, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        handshake = self._enter(call)
        step = _PART // source.array.itemsize
        for start in range(0, source.count, step):
            part = slice(start, min(start + step, source.count))
            counts = equal_counts(part.stop - start, self.size)
            mine = np.empty(counts[self.rank], source.array.dtype)
            self._scatter(handshake, call, source, source.array[part], mine, counts, op)
            out = target.array[part]
            handshake.carry(self._engine_all_gather(mine, out, counts, call.left()))
        self._done(handshake, call)

    def _reduce_scatter(
        self,
        call: Call,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        handshake = self._enter(call)
        self._scatter(handshake, call, source, source.array, target.array, counts, op)
        self._done(handshake, call)

    def _scatter(
        self,
        handshake: Handshake,
        call: Call,
        source: HostElements,
        array: np.ndarray,
        out: np.ndarray,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        """Reduce this rank's slice of ``array``, a part of ``source``, into ``out``."""
        if self.size == 1:
            reduce_rows([array], source.dtype, op, out)
            return
        slices = np.split(array, np.cumsum(counts)[:-1])
        step = max(1, _PIECE // (array.itemsize * (self.size - 1)))
        for start in range(0, max(counts), step):
            pieces = [each[start : start + step] for each in slices]
            own = pieces.pop(self.rank)  # does not travel
            sent = [piece.size for piece in pieces]
            sent.insert(self.rank, 0)
            received = [own.size * (rank != self.rank) for rank in range(self.size)]
            rows = np.empty((self.size - 1, own.size), array.dtype)
            there = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            handshake.carry(
                self._engine_all_to_all(there, rows.reshape(-1), sent, received, call.left())
            )
            ordered = [*rows[: self.rank], own, *rows[self.rank :]]
            reduce_rows(ordered, source.dtype, op, out[start : start + step])

    def _broadcast(self, call: Call, data: HostElements, root: int) -> None:
        handshake = self._enter(call)
        handshake.carry(self._engine_broadcast(data.array, root, call.left()))
        self._done(handshake, call)

    def _all_gather(
        self, call: Call, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        handshake = self._enter(call)
        handshake.carry(self._engine_all_gather(source.array, target.array, counts, call.left()))
        self._done(handshake, call)

    def _all_to_all(
        self,
        call: Call,
        source: HostElements,
        target: HostElements,
        sent: list[int],
        received: list[int],
    ) -> None:
        handshake = self._handshake(call)
        tables = {**handshake.gather([sent, received]), self.rank: [sent, received]}
        for a in range(self.size):
            for b in range(self.size):
                sends, expects = tables[a][0][b], tables[b][1][a]
                if sends != expects:
                    raise Mismatch(
                        f"{self._where(call.title)}: rank {a} sends {sends} elements to rank {b}, "
                        f"which expects {expects}. Make what a rank sends what the other expects.",
                        [rank for rank in (a, b) if rank != self.rank],
                    )
        handshake.carry(
            self._engine_all_to_all(source.array, target.array, sent, received, call.left())
        )
        self._done(handshake, call)

    def _done(self, handshake: Handshake, call: Call) -> None:
        self._copied = call.number
        handshake.leave()
