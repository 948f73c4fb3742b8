"""Communicators that let their engines start when all ranks have come and their calls fit."""

from __future__ import annotations

import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.communicators.buffers import HostElements, elements
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.checked import CheckedCommunicator
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.errors import CommunicatorError, Mismatch
from tagi_ddp.communicators.host.engine import Engine
from tagi_ddp.communicators.host.flat import Flat
from tagi_ddp.communicators.host.memory import HostMemory
from tagi_ddp.communicators.host.one_host import OneHost
from tagi_ddp.communicators.host.reduce import reduce_rows
from tagi_ddp.communicators.host.two_level import TwoLevel, number_of_lanes, ranks_by_host

_FEW_OF_ALL = 1 << 15  # bytes that messages of the handshake gather at most

Make = Callable[[str, list[int], Call], Engine]
"""Makes an engine ``(name, ranks, call)``, on all of ``ranks``; ``call`` is what errors name."""


class CheckedHostCommunicator(CheckedCommunicator[HostElements, None]):
    """A rank whose collectives bring all ranks together first; a subclass adds the engine."""

    _elements = staticmethod(elements)
    _engine: Engine | None = None  # of all ranks
    _lane: Engine | None = None  # of this rank and one of each other host
    _memory: HostMemory | None = None
    _given: Sequence[tuple[str, weakref.ref[Any], int, int]] = ()  # by `empty`: from where to where
    _way: Flat | TwoLevel | OneHost

    def open_ways(self, call: Call, make: Make) -> None:
        """Connect this rank; ``call`` is what errors name."""
        handshake = self._handshake(call)
        own = [two_levels_wanted(), secrets.token_hex(16), os.getuid()]
        with handshake.explaining():
            self._engine = make("all", list(range(self.size)), call)
            told = {**handshake.gather(own), self.rank: own}
            hosts = ranks_by_host(self._channel.hosts)
            self._way = flat = Flat(self._engine, self.rank, self.size)
            if len(hosts) == self.size > 1:
                flat.set_apart(handshake)
            elif len(hosts) < self.size and all(wanted for wanted, *_ in told.values()):
                if all(len({told[rank][2] for rank in ranks}) == 1 for ranks in hosts):
                    tokens = [told[ranks[0]][1] for ranks in hosts]
                    self._way = self._open_memory(flat, hosts, tokens, handshake, call, make)
                elif self.rank == 0:
                    warnings.warn(
                        "ranks of one host belong to several users, who cannot share its memory: "
                        "sums are slower. Start all ranks as one user.",
                        stacklevel=2,
                    )
        handshake.leave()

    def _open_memory(
        self,
        flat: Flat,
        hosts: list[list[int]],
        tokens: list[str],
        handshake: Handshake,
        call: Call,
        make: Make,
    ) -> OneHost | TwoLevel:
        """Return the way by the memory of each host, whose ranks know its token."""
        number = next(i for i, ranks in enumerate(hosts) if self.rank in ranks)
        local, size = hosts[number].index(self.rank), len(hosts[number])
        self._memory = HostMemory(local, size, tokens[number], handshake, call)
        if len(hosts) == 1:
            return OneHost(self._memory)
        lane = None
        if local < number_of_lanes(hosts):
            self._lane = make(f"lane {local}", [ranks[local] for ranks in hosts], call)
            lane = Flat(self._lane, number, len(hosts))
        levels = TwoLevel(hosts, self._memory, lane, flat)
        levels.measure(handshake)
        return levels

    def empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float32"
    ) -> npt.NDArray[Any]:
        """Return zeros, in memory that the ranks of this host share."""
        like = np.empty(shape, dtype)
        call = self._call("empty", f"{like.dtype.name}{list(like.shape)}", None)
        found = []

        def allocate() -> None:
            handshake = self._handshake(call)
            zeros = self._way.empty(handshake, like.shape, like.dtype.name)
            found.append(zeros)
            owner = zeros  # whose memory views go on using
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            begin = zeros.ctypes.data
            place = call.title, weakref.ref(owner), begin, begin + zeros.nbytes
            self._given = [*(each for each in self._given if each[1]() is not None), place]
            handshake.leave()

        self._collective(call, allocate, False)
        return found[0]

    def _tell_place(self, call: Call, data: HostElements) -> None:
        """Let calls of buffers that lie elsewhere in memory of `empty` not fit each other's."""
        for title, owner, begin, end in self._given:
            if begin <= data.address < data.end <= end and owner() is not None:
                call.arguments += f", in what {title} gave from byte {data.address - begin} on"

    def _enter(self, call: Call) -> Handshake:
        handshake = self._handshake(call)
        self._way.meet(handshake)
        return handshake

    def _engine_send(self, handshake: Handshake, data: HostElements, dst: int) -> None:
        assert self._engine is not None
        handshake.carry(self._engine.send(data.array, dst, handshake))

    def _engine_recv(self, handshake: Handshake, data: HostElements, src: int) -> None:
        assert self._engine is not None
        handshake.carry(self._engine.recv(data.array, src, handshake))

    def _engine_close(self, clean: bool) -> None:
        if self._memory is not None:
            self._memory.close()
        for engine in (self._lane, self._engine):
            if engine is not None:
                engine.close(clean)

    # Operations.

    def _all_reduce(
        self, call: Call, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        self._tell_place(call, source)
        if not source.count:  # of which engines send nothing, and so bring nobody together
            self._enter(call).leave()
            return
        handshake = self._handshake(call)
        if self._few(source.array.nbytes):
            rows = self._gather_few(handshake, source.array)
            reduce_rows(rows, source.dtype, op, target.array, self.size)
            handshake.leave()
            return
        self._way.all_reduce(handshake, source, target, op)
        self._done(handshake, call)

    def _reduce_scatter(
        self,
        call: Call,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        self._tell_place(call, source)
        handshake = self._handshake(call)
        self._way.reduce_scatter(handshake, source, target, counts, op)
        self._done(handshake, call)

    def _broadcast(self, call: Call, data: HostElements, root: int) -> None:
        handshake = self._handshake(call)
        self._way.broadcast(handshake, data, root)
        self._done(handshake, call)

    def _all_gather(
        self, call: Call, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        self._tell_place(call, target)
        kind = target.array.dtype
        handshake = self._handshake(call)
        if self._few(max(counts) * kind.itemsize):
            target.array[...] = np.concatenate(self._gather_few(handshake, source.array))
            handshake.leave()
            return
        self._way.all_gather(handshake, source, target, counts)
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
        self._way.all_to_all(handshake, source, target, sent, received)
        self._done(handshake, call)

    def _few(self, size: int) -> bool:
        """Tell whether messages of the handshake should gather at most so many bytes of a rank."""
        return size <= self._way.few and size * self.size <= _FEW_OF_ALL

    def _gather_few(self, handshake: Handshake, array: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of all ranks."""
        own = array.tobytes().hex()
        told = {**handshake.gather(own), self.rank: own}
        return [np.frombuffer(bytes.fromhex(told[rank]), array.dtype) for rank in range(self.size)]

    def _done(self, handshake: Handshake, call: Call) -> None:
        self._copied = call.number
        handshake.leave()

    def _announce(self, error: CommunicatorError, reason: str) -> None:
        super()._announce(error, reason)
        if self._memory is not None:
            with suppress(CommunicatorError):
                self._memory.abort(reason)


def two_levels_wanted() -> bool:
    """Return whether the environment lets this rank's collectives use its host's memory.

    Raises ValueError where TAGI_DDP_TWO_LEVELS is neither "0" nor "1".
    """
    wish = os.environ.get("TAGI_DDP_TWO_LEVELS", "1")
    if wish not in ("0", "1"):
        raise ValueError(f'TAGI_DDP_TWO_LEVELS must be "0" or "1", got {wish!r}')
    return wish == "1"
