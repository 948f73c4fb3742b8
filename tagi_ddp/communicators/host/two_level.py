"""Collectives of ranks that share hosts: shared memory within a host, the network between hosts.

The first ranks of each host, equally many on all, carry a slice each: a lane is one rank of every
host, with an engine of its own. So what leaves a host is as little as if it were one rank, and all
its ranks send. Large sums travel in chunks: while one is on the network, memory works on the next.

Numbers are added up over the ranks of each host, then over the hosts: all ranks get the same bits.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from tagi_ddp.communicators.buffers import HostElements, equal_counts
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import Communicator, ReduceOp, Work
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.errors import CommunicatorError, Timeout
from tagi_ddp.communicators.host.engine import Engine
from tagi_ddp.communicators.host.flat import Flat
from tagi_ddp.communicators.host.reduce import finish, reduce_rows, widen
from tagi_ddp.communicators.shm import create
from tagi_ddp.communicators.single import SingleCommunicator

_SMALL, _LARGE, _SOME = 1 << 22, 1 << 23, 4  # bytes of chunks, and a number that is enough
_WORTH = 0.004  # seconds on the network that make a smaller chunk worth what it costs
_TICKS = (0, 2, 5, 8)  # when each stage of a chunk begins, and ends: so many are at one
# What measures the network: bytes, more and more until they take so many seconds.
_PROBES, _CLEAR = (1 << 16, 1 << 18, 1 << 20, 1 << 22), 0.01
_MORE = 60.0  # seconds by which memory waits longer than a call: the handshake finds the reason

Make = Callable[[str, list[int], Call], Engine]
"""Makes an engine ``(name, ranks, call)``, on all of ``ranks``; ``call`` is what errors name."""

Stage = Callable[[int], Ready | None]
"""Begins a part of the work on a chunk; returns what waits for its end, if there is anything."""


class TwoLevel:
    """A rank of ``hosts``, which hold the numbers of their ranks.

    ``memory`` joins the ranks of this host, ``lane`` this rank and one of each other host; None on
    ranks that are in no lane, as all are on a single host. ``flat`` joins all.
    """

    def __init__(
        self, hosts: list[list[int]], memory: Communicator, lane: Flat | None, flat: Flat
    ) -> None:
        self._hosts = hosts
        self._host = next(i for i, ranks in enumerate(hosts) if flat.rank in ranks)
        self._memory = memory
        self._lane = lane
        self._flat = flat
        self._lanes = min(map(len, hosts))
        self._idle = [0] * (memory.size - self._lanes)  # what ranks in no lane carry
        self._latency, self._rate = 0.0, math.inf  # of the network between hosts

    def measure(self, handshake: Handshake) -> None:
        """Measure the network: seconds of a small sum, and bytes a second out of a host."""
        self._latency = self._seconds(handshake, 0)
        for size in _PROBES:
            seconds = self._seconds(handshake, size)
            if seconds > self._latency:
                self._rate = size / (seconds - self._latency)
            if seconds > max(_CLEAR, 2 * self._latency):
                return

    def _seconds(self, handshake: Handshake, size: int) -> float:
        """Return what a sum of so many bytes takes between hosts, the best time of some."""
        times = np.zeros(3)
        for i in range(len(times)):
            begin = time.perf_counter()
            if self._lane is not None:
                array = np.zeros(1 + size // 4 // self._lanes, np.float32)
                handshake.carry(self._lane.engine.all_reduce(array, "sum", handshake.left()))
            times[i] = time.perf_counter() - begin
        return float(self._flat.gather_rows(handshake, times).max(axis=0).min())

    def abort(self, reason: str) -> None:
        """Let no rank of this host wait in memory."""
        with suppress(CommunicatorError):
            self._memory.abort(reason)

    def close(self, clean: bool) -> None:
        """Close the levels; unless ``clean``, without waiting for what may be stuck."""
        self._memory.close()
        if self._lane is not None:
            self._lane.engine.close(clean)

    # Collectives, as in `Flat`.

    def all_reduce(
        self, handshake: Handshake, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        chunks = self._chunks(source)
        partial: list[Any] = [None] * len(chunks)  # of a chunk: this rank's slice

        def within(chunk: int) -> Ready:
            array = widen(source.array[chunks[chunk]], source.dtype)
            counts = self._slices(array.size)
            partial[chunk] = np.empty(counts[self._memory.rank], array.dtype)
            return self._reduce_within(handshake, array, partial[chunk], counts, op)

        def between(chunk: int) -> Ready | None:
            if self._lane is None:
                return None
            return self._lane.engine.all_reduce(partial[chunk], op, handshake.left())

        def share(chunk: int) -> Ready:
            out = target.array[chunks[chunk]]
            mine = finish(partial[chunk], target.dtype, op, self._flat.size)
            return self._gather_within(handshake, mine, out, self._slices(out.size))

        _pipeline(handshake, len(chunks), [within, between, share])

    def broadcast(self, handshake: Handshake, data: HostElements, root: int) -> None:
        chunks = self._chunks(data)
        host = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        mine: list[Any] = [None] * len(chunks)  # of a chunk: this rank's slice

        def within(chunk: int) -> Ready | None:
            if host != self._host:
                return None
            local = self._hosts[host].index(root)
            return _ready(
                self._memory.broadcast(
                    data.array[chunks[chunk]], local, async_op=True, timeout=_limit(handshake)
                )
            )

        def between(chunk: int) -> Ready | None:
            part = data.array[chunks[chunk]]
            counts = self._slices(part.size)
            own = _cut(part, counts)[self._memory.rank]
            mine[chunk] = own if host == self._host else np.empty_like(own)
            if self._lane is None:
                return None
            return self._lane.engine.broadcast(mine[chunk], host, handshake.left())

        def share(chunk: int) -> Ready | None:
            if host == self._host:
                return None
            part = data.array[chunks[chunk]]
            return self._gather_within(handshake, mine[chunk], part, self._slices(part.size))

        _pipeline(handshake, len(chunks), [within, between, share])

    def all_gather(
        self, handshake: Handshake, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        if len(self._hosts) == 1:
            handshake.carry(self._gather_within(handshake, source.array, target.array, counts))
            return
        kind = source.array.dtype
        sizes = [[counts[rank] for rank in ranks] for ranks in self._hosts]
        slices = [equal_counts(sum(size), self._lanes) for size in sizes]  # by host, lane
        block = np.empty(sum(sizes[self._host]), kind)  # of this host's ranks
        handshake.carry(self._gather_within(handshake, source.array, block, sizes[self._host]))
        mine = np.empty(0, kind)
        if self._lane is not None:
            lane = self._memory.rank
            own = _cut(block, slices[self._host])[lane]
            lengths = [lengths[lane] for lengths in slices]
            mine = np.empty(sum(lengths), kind)
            handshake.carry(self._lane.engine.all_gather(own, mine, lengths, handshake.left()))
        by_lane = [[lengths[lane] for lengths in slices] for lane in range(self._lanes)]
        everything = np.empty(sum(map(sum, by_lane)), kind)
        totals = [*map(sum, by_lane), *self._idle]
        handshake.carry(self._gather_within(handshake, mine, everything, totals))
        parts = [
            _cut(part, by_lane[i]) for i, part in enumerate(_cut(everything, totals)[: self._lanes])
        ]
        places = _cut(target.array, counts)
        for host, ranks in enumerate(self._hosts):
            whole = np.concatenate([part[host] for part in parts])
            for rank, part in zip(ranks, _cut(whole, sizes[host]), strict=True):
                places[rank][...] = part

    def reduce_scatter(
        self,
        handshake: Handshake,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        if len(self._hosts) == 1:
            array = widen(source.array, source.dtype)
            mine = target.array
            if array.dtype != mine.dtype:
                mine = np.empty(mine.size, array.dtype)
            handshake.carry(self._reduce_within(handshake, array, mine, counts, op))
            target.array[...] = finish(mine, target.dtype, op, self._flat.size)
            return
        sizes = [[counts[rank] for rank in ranks] for ranks in self._hosts]
        slices = [equal_counts(sum(size), self._lanes) for size in sizes]  # by host, lane
        given = _cut(source.array, counts)
        blocks = [np.concatenate([given[rank] for rank in ranks]) for ranks in self._hosts]
        by_host = [_cut(block, lengths) for block, lengths in zip(blocks, slices, strict=True)]
        ordered = np.concatenate([part[lane] for lane in range(self._lanes) for part in by_host])
        array = widen(ordered, source.dtype)
        totals = [sum(lengths[lane] for lengths in slices) for lane in range(self._lanes)]
        totals += self._idle
        mine = np.empty(totals[self._memory.rank], array.dtype)
        handshake.carry(self._reduce_within(handshake, array, mine, totals, op))
        own = slices[self._host]
        reduced = np.empty(0, target.array.dtype)
        if self._lane is not None:
            pieces = _cut(mine, [lengths[self._memory.rank] for lengths in slices])
            ready, rows = self._lane.exchange(pieces, handshake)
            handshake.carry(ready)
            reduced = self._reduce_between(rows, source, op)
        block = np.empty(sum(own), target.array.dtype)
        handshake.carry(self._gather_within(handshake, reduced, block, [*own, *self._idle]))
        target.array[...] = _cut(block, sizes[self._host])[self._memory.rank]

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
        out, places = _cut(source.array, sent), _cut(target.array, received)
        near = np.empty(sum(received[rank] for rank in here), target.array.dtype)
        far = np.empty(sum(received[rank] for rank in away), target.array.dtype)
        work = self._memory.all_to_all(
            np.concatenate([out[rank] for rank in here]),
            near,
            [sent[rank] for rank in here],
            [received[rank] for rank in here],
            async_op=True,
            timeout=_limit(handshake),
        )
        if away:
            handshake.carry(
                self._flat.engine.all_to_all(
                    np.concatenate([out[rank] for rank in away]),
                    far,
                    [count * (rank in away) for rank, count in enumerate(sent)],
                    [count * (rank in away) for rank, count in enumerate(received)],
                    handshake.left(),
                )
            )
        handshake.carry(_ready(work))
        for ranks, came in ((here, near), (away, far)):
            for rank, part in zip(ranks, _cut(came, [received[r] for r in ranks]), strict=True):
                places[rank][...] = part

    # Parts of them.

    def _chunks(self, elements: HostElements) -> list[slice]:
        """Return chunks of about equal length."""
        number = number_of_chunks(elements.array.nbytes, self._latency, self._rate)
        ends = accumulate(equal_counts(elements.count, number), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def _slices(self, count: int) -> list[int]:
        """Return how many of ``count`` elements each rank of this host carries."""
        return [*equal_counts(count, self._lanes), *self._idle]

    def _reduce_within(
        self,
        handshake: Handshake,
        array: np.ndarray,
        out: np.ndarray,
        counts: list[int],
        op: ReduceOp,
    ) -> Ready:
        """Begin to reduce over the ranks of this host, each to its slice; a mean is a sum yet."""
        return _ready(
            self._memory.reduce_scatter(
                array,
                out,
                counts,
                "sum" if op == "mean" else op,
                async_op=True,
                timeout=_limit(handshake),
            )
        )

    def _reduce_between(
        self, rows: list[np.ndarray], source: HostElements, op: ReduceOp
    ) -> np.ndarray:
        """Reduce the rows of the hosts to the final result."""
        out = np.empty(rows[0].size, source.array.dtype)
        reduce_rows(rows, source.dtype, op, out, self._flat.size)
        return out

    def _gather_within(
        self, handshake: Handshake, mine: np.ndarray, out: np.ndarray, counts: list[int]
    ) -> Ready:
        """Begin to give all ranks of this host the slices of all."""
        return _ready(
            self._memory.all_gather(mine, out, counts, async_op=True, timeout=_limit(handshake))
        )


def ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ones."""
    return [
        [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)
    ]


def two_levels_wanted() -> bool:
    """Return whether the environment lets this rank's collectives have two levels.

    Raises ValueError where TAGI_DDP_TWO_LEVELS is neither "0" nor "1".
    """
    wish = os.environ.get("TAGI_DDP_TWO_LEVELS", "1")
    if wish not in ("0", "1"):
        raise ValueError(f'TAGI_DDP_TWO_LEVELS must be "0" or "1", got {wish!r}')
    return wish == "1"


def open_two_levels(
    flat: Flat,
    hosts: list[list[int]],
    tokens: Mapping[int, str],
    handshake: Handshake,
    call: Call,
    make: Make,
) -> TwoLevel:
    """Return the levels of a rank; ``tokens``, a secret of each rank, tell apart groups.

    A collective call, which ``handshake`` is to conclude.
    """
    [number] = [i for i, ranks in enumerate(hosts) if flat.rank in ranks]
    token = tokens[hosts[number][0]]
    local, size = hosts[number].index(flat.rank), len(hosts[number])
    memory: Communicator = SingleCommunicator(call.limit)
    if size > 1:
        memory = create(local, size, token, call.left(), spin=False)
    lane = None
    if len(hosts) > 1 and local < min(map(len, hosts)):
        engine = make(f"lane {local}", [ranks[local] for ranks in hosts], call)
        lane = Flat(engine, number, len(hosts))
    levels = TwoLevel(hosts, memory, lane, flat)
    if len(hosts) > 1:
        levels.measure(handshake)
    return levels


def number_of_chunks(size: float, latency: float, rate: float) -> int:
    """Return in how many chunks so many bytes travel; small ones only until there are some.

    ``latency`` of the network between hosts is in seconds, ``rate`` in bytes a second out of one.
    """
    worth = max(_WORTH, 4 * latency) * rate
    some = _SOME if size >= _SOME * worth else min(_SOME, size // _SMALL)
    return int(max(1, some, size // _LARGE))


def _cut(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    ends = accumulate(counts, initial=0)
    return [array[begin:end] for begin, end in pairwise(ends)]


def _limit(handshake: Handshake) -> float:
    return handshake.left() + _MORE


def _ready(work: Work | None) -> Ready:
    assert work is not None

    def ready(seconds: float) -> bool:
        try:
            work.wait(seconds)
        except Timeout:
            if not work.done():
                return False  # the wait timed out, not the operation
            work.wait(seconds)  # raises the operation's own error
        return True

    return ready


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
