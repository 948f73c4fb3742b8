"""Ranks that share hosts: a communicator made of two, the node's and one between nodes.

The first ranks of each node, as many as the smallest node has, send a slice of the node's data
each. So no more bytes leave a host than if it were one rank, and several ranks send them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tagi_ddp.communicators import shm
from tagi_ddp.communicators.buffers import HostElements, cut, equal_counts
from tagi_ddp.communicators.communicator import Communicator, ReduceOp
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.errors import CommunicatorError, Timeout, name_ranks, what_happened
from tagi_ddp.communicators.network.communicator import NetworkCommunicator, OpenLibrary
from tagi_ddp.communicators.operations import Call, Ready
from tagi_ddp.communicators.reduce import finish, partial_op, widen
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.communicators.topology import ranks_by_host

_SMALL = 8192  # bytes that one rank of each node sends faster than several
CHUNK = 1 << 23
"""The bytes of a sum that are between nodes while the nodes work on others."""

_MORE = 60.0  # seconds that a level waits longer than the whole, which names the late ranks


Stage = Callable[[int], Ready]
"""Begins one stage of the work on a chunk."""


class TwoLevelCommunicator(NetworkCommunicator):
    """A rank of several hosts, some of which have several ranks.

    Sums, broadcasts, gathers and scatters are operations of the two levels, which compare their
    purpose. Messages and `all_to_all` are operations of the library.
    """

    node: Communicator
    """The ranks of this rank's host, in rank order, over its memory."""
    inter_node: Communicator | None = None
    """This rank and those with the same number on other hosts; None if a host has none."""
    _operation: Handshake
    """The handshake of the operation under way, one at a time, that uses the levels."""

    def open(self, open_library: OpenLibrary, call: Call) -> None:
        """Connect all ranks, then those of each level."""
        super().open(open_library, call)
        self._levels: list[shm.ShmCommunicator | NetworkCommunicator] = []
        self._hosts = ranks_by_host(self.sites.topology.locations)
        self._host = next(i for i, ranks in enumerate(self._hosts) if self.rank in ranks)
        here = self._hosts[self._host]
        self._senders = min(map(len, self._hosts))  # ranks of each host that send to others
        self._idle = [0] * (len(here) - self._senders)
        number = here.index(self.rank)
        handshake = self._handshake(replace(call, number=call.number + 1))
        tokens = handshake.gather(secrets.token_hex(16))
        self.node = SingleCommunicator(self.timeout)
        if len(here) > 1:
            token, size = tokens[here[0]], len(here)
            node = shm.create(number, size, token, call.left(), spin=False, backend=self.backend)
            self.node = node
            self._levels.append(node)
        color = number if number < self._senders else None
        self.inter_node = self._split(call, color, self.rank)
        if self.inter_node is not None:
            self._levels.append(cast(NetworkCommunicator, self.inter_node))

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        return self._hosts

    def _zeros(self, handshake: Handshake, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        try:
            return self.node.empty(like.shape, like.dtype)
        except CommunicatorError as error:
            handshake.explain(self._in_world(self.node, error))

    def _all_reduce(
        self, call: Call, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        size, within = source.array.nbytes, partial_op(op)
        chunks = _chunks(source)
        mine: list[Any] = [None] * len(chunks)  # this rank's slice of each chunk

        def scatter(chunk: int) -> Ready:
            array = widen(source.array[chunks[chunk]], source.dtype)
            counts = self._slices(array.size, size)
            mine[chunk] = np.empty(counts[self.node.rank], array.dtype)
            return self._begin(self.node, "reduce_scatter", array, mine[chunk], counts, within)

        def between(chunk: int) -> Ready:
            return self._between(mine[chunk], "all_reduce", mine[chunk], within)

        def gather(chunk: int) -> Ready:
            out = target.array[chunks[chunk]]
            result = finish(mine[chunk], target.dtype, op, self.size)
            counts = self._slices(out.size, size)
            return self._begin(self.node, "all_gather", result, out, counts)

        with self._by_levels(call) as handshake:
            _pipeline(handshake, len(chunks), [scatter, between, gather])

    def _broadcast(self, call: Call, data: HostElements, root: int) -> None:
        size = data.array.nbytes
        chunks = _chunks(data)
        mine: list[Any] = [None] * len(chunks)
        home = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        first = self._hosts[home].index(root)  # the root's number in its node

        def scatter(chunk: int) -> Ready:
            part = data.array[chunks[chunk]]
            counts, none = self._slices(part.size, size), [0] * self.node.size
            own = counts[self.node.rank]
            mine[chunk] = np.empty(own, part.dtype)
            if home != self._host:  # The ranks of this node only compare the call, once.
                if chunk:
                    return _at_once
                return self._begin(self.node, "all_to_all", part[:0], mine[chunk][:0], none, none)
            sent = counts if self.rank == root else none
            received = [*none[:first], own, *none[first + 1 :]]
            root_part = part[: sum(sent)]
            return self._begin(self.node, "all_to_all", root_part, mine[chunk], sent, received)

        def between(chunk: int) -> Ready:
            return self._between(mine[chunk], "broadcast", mine[chunk], home)

        def gather(chunk: int) -> Ready:
            part = data.array[chunks[chunk]]
            if home == self._host:
                return self._begin(self.node, "broadcast", part, first)
            counts = self._slices(part.size, size)
            return self._begin(self.node, "all_gather", mine[chunk], part, counts)

        with self._by_levels(call) as handshake:
            _pipeline(handshake, len(chunks), [scatter, between, gather])

    def _all_gather(
        self, call: Call, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        sizes, slices = self._sizes(counts, target.array.nbytes)
        by_sender = [list(lengths) for lengths in zip(*slices, strict=True)]
        totals = [*map(sum, by_sender), *self._idle]
        number, kind = self.node.rank, source.array.dtype
        block = np.empty(sum(sizes[self._host]), kind)  # the data of this host's ranks
        mine = np.empty(totals[number], kind)
        everything = np.empty(sum(totals), kind)
        with self._by_levels(call) as handshake:
            gather = partial(self._begin, self.node, "all_gather")
            handshake.wait_for(gather(source.array, block, sizes[self._host]))
            if self.inter_node is not None:
                own = cut(block, slices[self._host])[number]
                ready = self._between(mine, "all_gather", own, mine, by_sender[number])
                handshake.wait_for(ready)
            handshake.wait_for(gather(mine, everything, totals))
            parts = [
                cut(part, lengths)
                for part, lengths in zip(cut(everything, totals), by_sender, strict=False)
            ]
            out = cut(target.array, counts)
            for host, ranks in enumerate(self._hosts):
                whole = np.concatenate([part[host] for part in parts])
                for rank, part in zip(ranks, cut(whole, sizes[host]), strict=True):
                    out[rank][...] = part

    def _reduce_scatter(
        self,
        call: Call,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        sizes, slices = self._sizes(counts, source.array.nbytes)
        by_rank = cut(source.array, counts)
        by_host = [
            cut(np.concatenate([by_rank[rank] for rank in ranks]), lengths)
            for ranks, lengths in zip(self._hosts, slices, strict=True)
        ]
        ordered = np.concatenate([part[i] for i in range(self._senders) for part in by_host])
        array = widen(ordered, source.dtype)
        by_sender = [list(lengths) for lengths in zip(*slices, strict=True)]
        totals = [*map(sum, by_sender), *self._idle]
        number, within, own = self.node.rank, partial_op(op), slices[self._host]
        mine = np.empty(totals[number], array.dtype)
        reduced = np.empty([*own, *self._idle][number], array.dtype)
        block = np.empty(sum(own), array.dtype)
        with self._by_levels(call) as handshake:
            reduce = "reduce_scatter"
            handshake.wait_for(self._begin(self.node, reduce, array, mine, totals, within))
            if self.inter_node is not None:
                ready = self._between(mine, reduce, mine, reduced, by_sender[number], within)
                handshake.wait_for(ready)
            gather = self._begin(self.node, "all_gather", reduced, block, [*own, *self._idle])
            handshake.wait_for(gather)
            result = cut(block, sizes[self._host])[number]
            target.array[...] = finish(result, target.dtype, op, self.size)

    # Operations of the levels.

    @contextmanager
    def _by_levels(self, call: Call) -> Iterator[Handshake]:
        """Yield the handshake of an operation that the levels perform in the block."""
        handshake = self._operation = self._handshake(call)
        handshake.begin()
        for level in self._levels:
            level.purpose = str(call)
        try:
            yield handshake
        finally:
            del self._operation  # It refers to this communicator, which may be forgotten.
            for level in self._levels:
                level.purpose = ""
        handshake.conclude()
        handshake.leave()

    def _begin(self, level: Communicator, operation: str, *arguments: Any) -> Ready:
        """Begin an operation of a level."""
        limit = self._operation.call.left() + _MORE
        try:
            work = getattr(level, operation)(*arguments, async_op=True, timeout=limit)
        except CommunicatorError as error:
            self._operation.explain(self._in_world(level, error))

        def ready(seconds: float) -> bool:
            try:
                try:
                    work.wait(seconds)
                except Timeout:
                    if not work.done():
                        return False  # The wait has timed out, not the operation.
                    work.wait()  # It raises the error of the operation, if it has one.
            except CommunicatorError as error:
                raise self._in_world(level, error) from error
            return True

        return ready

    def _between(self, mine: np.ndarray, operation: str, *arguments: Any) -> Ready:
        """Begin an operation between nodes, unless this rank's slice ``mine`` is empty.

        The first rank of each node takes part even then.
        """
        if self.inter_node is None or (mine.size == 0 and self.node.rank > 0):
            return _at_once
        return self._begin(self.inter_node, operation, *arguments)

    def _in_world(self, level: Communicator, error: CommunicatorError) -> CommunicatorError:
        """Return an error of a level with ranks numbered as in the whole group."""
        ranks = self._hosts[self._host]
        if level is self.inter_node:
            ranks = [each[self.node.rank] for each in self._hosts]
        blamed = [ranks[rank] for rank in error.ranks]
        text = f"{level.backend} says: {what_happened(error)}"
        if blamed:
            text += f" Of all ranks: {name_ranks(blamed)}."
        return type(error)(text, blamed)

    def _sizes(self, counts: list[int], size: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return by host the counts of its ranks, and the shares of its senders of their sum."""
        sizes = [[counts[rank] for rank in ranks] for ranks in self._hosts]
        return sizes, [self._shares(sum(each), size) for each in sizes]

    def _shares(self, count: int, size: int) -> list[int]:
        """Return each sender's share of ``count`` elements of an operation on ``size`` bytes."""
        if size <= _SMALL:
            return [count] + [0] * (self._senders - 1)
        return equal_counts(count, self._senders)

    def _slices(self, count: int, size: int) -> list[int]:
        """Return the share of each rank of this host; see `_shares`."""
        return [*self._shares(count, size), *self._idle]

    def _announce(self, error: CommunicatorError, reason: str) -> None:
        super()._announce(error, reason)
        for level in self._levels:
            with suppress(CommunicatorError):  # The level may be closed.
                level.abort(reason)

    def _library_close(self, clean: bool) -> None:
        for level in self._levels:
            level.close()
        super()._library_close(clean)


def _chunks(elements: HostElements) -> list[slice]:
    """Return chunks of about equal length, at least one."""
    number = max(1, elements.array.nbytes // CHUNK)
    ends = np.linspace(0, elements.count, number + 1).astype(int).tolist()
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _at_once(seconds: float) -> bool:
    """Return True: there is nothing to wait for."""
    return True


def _pipeline(handshake: Handshake, chunks: int, stages: Sequence[Stage]) -> None:
    """Run all stages on all chunks, one chunk in each stage, in the same order on all ranks."""
    begun: dict[int, Ready] = {}  # by chunk
    for tick in range(chunks + len(stages)):
        for number in range(len(stages) + 1):
            chunk = tick - number
            if 0 <= chunk < chunks:
                handshake.wait_for(begun.pop(chunk, _at_once))
                if number < len(stages):
                    begun[chunk] = stages[number](chunk)
