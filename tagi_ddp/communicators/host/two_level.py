"""Collectives of ranks that share hosts: shared memory within a host, the network between hosts.

The first ranks of each host, equally many on all, carry a slice each: a lane is one rank of every
host, with an engine of its own. So what leaves a host is as little as if it were one rank, and all
its ranks send. Large sums travel in chunks: while one is on the network, memory works on the next.

Numbers are added up over the ranks of each host, then over the hosts: all ranks get the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.communicators.buffers import HostElements, cut, equal_counts
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.host.flat import FEW, Flat
from tagi_ddp.communicators.host.memory import HostMemory, MemoryOperation
from tagi_ddp.communicators.host.messages import SMALL
from tagi_ddp.communicators.host.reduce import finish, partial_op, reduce_rows, widen

_SMALL_CHUNK, _LARGE_CHUNK = 1 << 22, 1 << 23  # bytes
_FEW_HOSTS = 16  # that ask each other faster than messages tell all
_WORTH = 0.014  # seconds on the network that make smaller chunks worth what they cost
_TICKS = (0, 2, 5, 8)  # when each stage of a chunk begins, and ends: so many are at one
# What measures the network: bytes, more and more until they take so many seconds.
_PROBES, _CLEAR = (1 << 16, 1 << 18, 1 << 20, 1 << 22), 0.01
_SLOW = 0.1  # seconds of the first of them that tell the rate without another

Stage = Callable[[int], Ready | None]
"""Begins a part of the work on a chunk; returns what waits for its end, if there is anything."""


class TwoLevel:
    """A rank of several ``hosts``, which hold the numbers of their ranks.

    ``memory`` joins the ranks of this host, ``lane`` this rank and one of each other host; None on
    ranks that are in no lane. ``flat`` joins all.
    """

    def __init__(
        self, hosts: list[list[int]], memory: HostMemory, lane: Flat | None, flat: Flat
    ) -> None:
        self._hosts = hosts
        self._host = next(i for i, ranks in enumerate(hosts) if flat.rank in ranks)
        self._memory = memory
        self._lane = lane
        self._flat = flat
        self._lanes = number_of_lanes(hosts)
        self._idle = [0] * (memory.size - self._lanes)  # what ranks in no lane carry
        self._latency, self._rate = 0.0, math.inf  # of the network between hosts
        self.few = 0 if flat.engine.quick else FEW

    def measure(self, handshake: Handshake) -> None:
        """Measure the network: seconds of a small sum, and bytes a second out of a host."""
        if self._lane is not None:
            self._lane.engine.prepare_sums(handshake, self._lanes)
        smaller, before = 0, self._seconds(handshake, 0)
        self._latency = before
        for size in _PROBES:
            seconds = self._seconds(handshake, size)
            if seconds > before:
                self._rate = (size - smaller) / (seconds - before)
            # The first probe takes more messages than few bytes do: they may be all of its time.
            if seconds > (max(_CLEAR, 2 * before) if smaller else max(_SLOW, 8 * before)):
                return
            smaller, before = size, seconds

    def _seconds(self, handshake: Handshake, size: int) -> float:
        """Return what a sum of so many bytes takes between hosts, the best time of some."""
        times = np.zeros(3)
        for i in range(len(times)):
            begin = time.perf_counter()
            if self._lane is not None:
                array = np.zeros(1 + size // 4 // self._lanes, np.float32)
                handshake.carry(self._lane.engine.all_reduce(array, "sum", handshake))
            times[i] = time.perf_counter() - begin
        return float(self._flat.gather_rows(handshake, times).max(axis=0).min())

    # Collectives, as in `Flat`.

    def meet(self, handshake: Handshake) -> None:
        if len(self._hosts) > _FEW_HOSTS:
            handshake.meet()
            return
        handshake.begin()
        self._conclude(handshake, self._ask(handshake, self._memory.agree(handshake)))

    def empty(self, handshake: Handshake, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        self.meet(handshake)
        return self._memory.empty(handshake, shape, dtype)

    def all_reduce(
        self, handshake: Handshake, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        met = self._meet_beside(handshake)
        if op == "mean":  # which memory and lanes take for a sum
            self._memory.agree(handshake)
        chunks = self._chunks(source)
        slices = partial(self._slices, size=source.array.nbytes)
        start = partial(self._start, handshake, len(chunks))
        sums: list[Any] = [None] * len(chunks)  # of a chunk: this rank's slice

        def within(chunk: int) -> Ready | None:
            array = widen(source.array[chunks[chunk]], source.dtype)
            counts = slices(array.size)
            sums[chunk] = np.empty(counts[self._memory.rank], array.dtype)
            operation = self._reduce_within(array, sums[chunk], counts, op)
            if chunk:
                return self._memory.begin(handshake, operation)
            self._memory.run(handshake, operation)
            met()
            return None

        def between(chunk: int) -> Ready | None:
            if self._lane is None or not sums[chunk].size:
                return None
            return self._lane.engine.all_reduce(sums[chunk], op, handshake)

        def share(chunk: int) -> Ready | None:
            out = target.array[chunks[chunk]]
            mine = finish(sums[chunk], target.dtype, op, self._flat.size)
            return start(self._gather_within(mine, out, slices(out.size)))

        _pipeline(handshake, len(chunks), [within, between, share])
        if self._flat.engine.sums_meet:  # in each lane, and all lanes in each host's memory
            handshake.met()

    def broadcast(self, handshake: Handshake, data: HostElements, root: int) -> None:
        self.meet(handshake)
        chunks = self._chunks(data)
        slices = partial(self._slices, size=data.array.nbytes)
        host = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        start = partial(self._start, handshake, len(chunks))
        mine: list[Any] = [None] * len(chunks)  # of a chunk: this rank's slice

        def within(chunk: int) -> Ready | None:
            if host != self._host:
                return None
            local = self._hosts[host].index(root)
            return start(partial(self._memory.comm.broadcast, data.array[chunks[chunk]], local))

        def between(chunk: int) -> Ready | None:
            part = data.array[chunks[chunk]]
            own = cut(part, slices(part.size))[self._memory.rank]
            mine[chunk] = own if host == self._host else np.empty_like(own)
            if self._lane is None or not own.size:
                return None
            return self._lane.engine.broadcast(mine[chunk], host, handshake)

        def share(chunk: int) -> Ready | None:
            if host == self._host:
                return None
            part = data.array[chunks[chunk]]
            return start(self._gather_within(mine[chunk], part, slices(part.size)))

        _pipeline(handshake, len(chunks), [within, between, share])

    def all_gather(
        self, handshake: Handshake, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        self.meet(handshake)
        kind = source.array.dtype
        sizes = [[counts[rank] for rank in ranks] for ranks in self._hosts]
        slices = [self._shares(sum(size), target.array.nbytes) for size in sizes]  # by host, lane
        block = np.empty(sum(sizes[self._host]), kind)  # of this host's ranks
        run = partial(self._memory.run, handshake)
        run(self._gather_within(source.array, block, sizes[self._host]))
        by_lane = [[lengths[lane] for lengths in slices] for lane in range(self._lanes)]
        totals = [*map(sum, by_lane), *self._idle]
        mine = np.empty(totals[self._memory.rank], kind)
        if self._lane is not None and mine.size:
            lane = self._memory.rank
            own = cut(block, slices[self._host])[lane]
            handshake.carry(self._lane.engine.all_gather(own, mine, by_lane[lane], handshake))
        everything = np.empty(sum(totals), kind)
        run(self._gather_within(mine, everything, totals))
        parts = [
            cut(part, by_lane[i]) for i, part in enumerate(cut(everything, totals)[: self._lanes])
        ]
        places = cut(target.array, counts)
        for host, ranks in enumerate(self._hosts):
            whole = np.concatenate([part[host] for part in parts])
            for rank, part in zip(ranks, cut(whole, sizes[host]), strict=True):
                places[rank][...] = part

    def reduce_scatter(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        self.meet(handshake)
        sizes = [[counts[rank] for rank in ranks] for ranks in self._hosts]
        slices = [self._shares(sum(size), source.array.nbytes) for size in sizes]  # by host, lane
        given = cut(source.array, counts)
        blocks = [np.concatenate([given[rank] for rank in ranks]) for ranks in self._hosts]
        by_host = [cut(block, lengths) for block, lengths in zip(blocks, slices, strict=True)]
        ordered = np.concatenate([part[lane] for lane in range(self._lanes) for part in by_host])
        array = widen(ordered, source.dtype)
        totals = [sum(lengths[lane] for lengths in slices) for lane in range(self._lanes)]
        totals += self._idle
        mine = np.empty(totals[self._memory.rank], array.dtype)
        run = partial(self._memory.run, handshake)
        run(self._reduce_within(array, mine, totals, op))
        own = slices[self._host]
        reduced = np.empty(0, target.array.dtype)
        if self._lane is not None and mine.size:
            pieces = cut(mine, [lengths[self._memory.rank] for lengths in slices])
            ready, rows = self._lane.exchange(pieces, handshake)
            handshake.carry(ready)
            reduced = self._reduce_between(rows, source, op)
        block = np.empty(sum(own), target.array.dtype)
        run(self._gather_within(reduced, block, [*own, *self._idle]))
        target.array[...] = cut(block, sizes[self._host])[self._memory.rank]

    def all_to_all(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        sent: list[int],
        received: list[int],
    ) -> None:
        here = self._hosts[self._host]
        away = [rank for rank in range(self._flat.size) if rank not in here]
        out, places = cut(source.array, sent), cut(target.array, received)
        near = np.empty(sum(received[rank] for rank in here), target.array.dtype)
        far = np.empty(sum(received[rank] for rank in away), target.array.dtype)
        ready = self._memory.begin(
            handshake,
            self._memory.comm.all_to_all,
            np.concatenate([out[rank] for rank in here]),
            near,
            [sent[rank] for rank in here],
            [received[rank] for rank in here],
        )
        handshake.carry(
            self._flat.engine.all_to_all(
                np.concatenate([out[rank] for rank in away]),
                far,
                [count * (rank in away) for rank, count in enumerate(sent)],
                [count * (rank in away) for rank, count in enumerate(received)],
                handshake,
            )
        )
        handshake.carry(ready)
        for ranks, came in ((here, near), (away, far)):
            for rank, part in zip(ranks, cut(came, [received[r] for r in ranks]), strict=True):
                places[rank][...] = part

    # Parts of them.

    def _meet_beside(self, handshake: Handshake) -> Callable[[], None]:
        """Begin to bring all ranks together; return what concludes it.

        What they do meanwhile in the memory of their hosts makes sure that those agree.
        """
        if self._flat.engine.sums_meet:
            handshake.begin()
            return lambda: None
        if len(self._hosts) > _FEW_HOSTS:
            handshake.meet()
            return lambda: None
        handshake.begin()
        return partial(self._conclude, handshake, self._ask(handshake, True))

    def _ask(self, handshake: Handshake, here: bool) -> Callable[[], bool]:
        """Let the first ranks of the hosts begin to ask each other; return what ends it.

        It tells whether all call the same, and all do so ``here`` on their hosts.
        """
        if self._memory.rank != 0:
            return lambda: True
        assert self._lane is not None
        mine = np.frombuffer(handshake.word + bytes([here]), np.uint8)
        words = np.empty((self._lane.size, mine.size), np.uint8)
        counts, out = [mine.size] * self._lane.size, words.reshape(-1)
        ready = self._lane.engine.all_gather(mine, out, counts, handshake)

        def agreed() -> bool:
            handshake.carry(ready)
            return here and bool((words == mine).all())

        return agreed

    def _conclude(self, handshake: Handshake, agreed: Callable[[], bool]) -> None:
        """Let the first rank of the host tell the others whether all have ``agreed``."""
        told = np.array([agreed()], np.uint8)
        self._memory.run(handshake, self._memory.comm.broadcast, told, 0)
        handshake.met(bool(told[0]))

    def _chunks(self, elements: HostElements) -> list[slice]:
        """Return chunks of about equal length."""
        size, some = elements.array.nbytes, self._flat.engine.chunks
        number = number_of_chunks(size, self._latency, self._rate, some)
        ends = accumulate(equal_counts(elements.count, number), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def _shares(self, count: int, size: int) -> list[int]:
        """Return how many of ``count`` elements each lane carries of ``size`` bytes in all.

        A few bytes take one lane less time than all of them.
        """
        if size <= SMALL:
            return [count] + [0] * (self._lanes - 1)
        return equal_counts(count, self._lanes)

    def _slices(self, count: int, size: int) -> list[int]:
        """Return how many of them each rank of this host carries."""
        return [*self._shares(count, size), *self._idle]

    def _start(self, handshake: Handshake, chunks: int, operation: MemoryOperation) -> Ready | None:
        """Begin an operation on one of ``chunks``; a single one is done at once, in this thread."""
        if chunks > 1:
            return self._memory.begin(handshake, operation)
        self._memory.run(handshake, operation)
        return None

    def _reduce_within(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], op: ReduceOp
    ) -> MemoryOperation:
        """Reduce over the ranks of this host, each to its slice; a mean is a sum yet."""
        return partial(self._memory.comm.reduce_scatter, array, out, counts, partial_op(op))

    def _reduce_between(
        self, rows: list[np.ndarray], source: HostElements, op: ReduceOp
    ) -> np.ndarray:
        """Reduce the rows of the hosts to the final result."""
        out = np.empty(rows[0].size, source.array.dtype)
        reduce_rows(rows, source.dtype, op, out, self._flat.size)
        return out

    def _gather_within(
        self, mine: np.ndarray, out: np.ndarray, counts: list[int]
    ) -> MemoryOperation:
        """Give all ranks of this host the slices of all."""
        return partial(self._memory.comm.all_gather, mine, out, counts)


def ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ones."""
    return [
        [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)
    ]


def number_of_lanes(hosts: list[list[int]]) -> int:
    """Return how many ranks of each host carry slices."""
    return min(map(len, hosts))


def number_of_chunks(size: float, latency: float, rate: float, some: int) -> int:
    """Return in how many chunks so many bytes travel; small ones only until there are ``some``.

    ``latency`` of the network between hosts is in seconds, ``rate`` in bytes a second out of one.
    """
    if size < max(_WORTH, 16 * latency) * rate:
        some = int(min(some, size // _SMALL_CHUNK))
    return int(max(1, some, size // _LARGE_CHUNK))


def _pipeline(handshake: Handshake, chunks: int, stages: list[Stage]) -> None:
    """Bring all chunks through all stages, in the same order on all ranks: several at each."""
    pending: dict[int, Ready | None] = {}  # by chunk
    for tick in range(chunks + _TICKS[-1]):
        for stage, begin in enumerate(_TICKS):
            chunk = tick - begin
            if 0 <= chunk < chunks:
                if (ready := pending.pop(chunk, None)) is not None:
                    handshake.carry(ready)
                if stage < len(stages):
                    pending[chunk] = stages[stage](chunk)
