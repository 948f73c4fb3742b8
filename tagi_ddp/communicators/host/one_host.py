"""Collectives of ranks that are all on one host: its memory does them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.communicators.buffers import HostElements
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.host.memory import HostMemory, MemoryOperation
from tagi_ddp.communicators.host.reduce import finish, partial_op, widen


class OneHost:
    """A rank of the host with this ``memory``; the methods are those of `Flat`."""

    few = 0

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def meet(self, handshake: Handshake) -> None:
        self._run(handshake, self._memory.comm.barrier)

    def empty(self, handshake: Handshake, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        handshake.begin()
        zeros = self._memory.empty(handshake, shape, dtype)
        handshake.met()
        return zeros

    def all_reduce(
        self, handshake: Handshake, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        def reduce(array: np.ndarray, out: np.ndarray, op: ReduceOp) -> MemoryOperation:
            return partial(self._memory.comm.all_reduce, array, op, out=out)

        self._reduce(handshake, source, target, op, reduce)

    def broadcast(self, handshake: Handshake, data: HostElements, root: int) -> None:
        self._run(handshake, self._memory.comm.broadcast, data.array, root)

    def all_gather(
        self, handshake: Handshake, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        self._run(handshake, self._memory.comm.all_gather, source.array, target.array, counts)

    def reduce_scatter(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        def reduce(array: np.ndarray, out: np.ndarray, op: ReduceOp) -> MemoryOperation:
            return partial(self._memory.comm.reduce_scatter, array, out, counts, op)

        self._reduce(handshake, source, target, op, reduce)

    def all_to_all(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        sent: list[int],
        received: list[int],
    ) -> None:
        self._memory.run(
            handshake, self._memory.comm.all_to_all, source.array, target.array, sent, received
        )

    def _reduce(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        op: ReduceOp,
        reduce: Callable[[np.ndarray, np.ndarray, ReduceOp], MemoryOperation],
    ) -> None:
        """Reduce; memory knows no bfloat16, and adds up 16-bit floats as wider ones."""
        array = widen(source.array, source.dtype)
        if array is source.array:
            self._run(handshake, reduce(array, target.array, op))
            return
        out = np.empty(target.count, array.dtype)
        self._run(handshake, reduce(array, out, partial_op(op)))
        target.array[...] = finish(out, target.dtype, op, self._memory.size)

    def _run(self, handshake: Handshake, operation: MemoryOperation, *arguments: Any) -> None:
        """Let an operation, whose calls memory compares, bring all ranks together."""
        handshake.begin()
        self._memory.run(handshake, operation, *arguments)
        handshake.met()
