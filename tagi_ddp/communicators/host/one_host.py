"""Collectives of ranks that are all on one host: its memory does them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tagi_ddp.communicators.buffers import HostElements
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.host.memory import HostMemory
from tagi_ddp.communicators.host.reduce import finish, widen


class OneHost:
    """A rank of the host with this ``memory``; the methods are those of `Flat`."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def meet(self, handshake: Handshake) -> None:
        self._run(handshake, self._memory.comm.barrier)

    def all_reduce(
        self, handshake: Handshake, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        comm = self._memory.comm
        array = widen(source.array, source.dtype)
        if array is source.array:
            self._run(handshake, partial(comm.all_reduce, array, op, out=target.array))
            return
        self._run(handshake, comm.all_reduce, array, "sum" if op == "mean" else op)
        target.array[...] = finish(array, target.dtype, op, comm.size)

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
        comm = self._memory.comm
        array = widen(source.array, source.dtype)
        if array is source.array:
            self._run(handshake, comm.reduce_scatter, array, target.array, counts, op)
            return
        mine = np.empty(target.count, array.dtype)
        among = "sum" if op == "mean" else op
        self._run(handshake, comm.reduce_scatter, array, mine, counts, among)
        target.array[...] = finish(mine, target.dtype, op, comm.size)

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

    def _run(self, handshake: Handshake, operation: Callable[..., Any], *arguments: Any) -> None:
        """Let an operation, whose calls memory compares, bring all ranks together."""
        handshake.begin()
        self._memory.run(handshake, operation, *arguments)
        handshake.met()
