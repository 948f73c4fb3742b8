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
from typing import Any, NoReturn, Protocol, cast

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


class _Level(Communicator, Protocol):
    """A communicator whose ranks compare the purpose of their calls, too."""

    purpose: str


Stage = Callable[[int], Ready | None]
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

    def open(self, open_library: OpenLibrary, call: Call) -> None:
        """Connect all ranks, then those of each level."""
        super().open(open_library, call)
        self._levels: list[_Level] = []
        self._hosts = ranks_by_host(self.sites.topology.locations)
        self._host = next(i for i, ranks in enumerate(self._hosts) if self.rank in ranks)
        here = self._hosts[self._host]
        self._senders = min(map(len, self._hosts))  # ranks of each host that send to others
        self._idle = [0] * (len(here) - self._senders)
        number = here.index(self.rank)
        token = secrets.token_hex(16)
        others = self._handshake(replace(call, number=call.number + 1)).gather(token)
        self.node = SingleCommunicator(self.timeout)
        if len(here) > 1:
            token = others.get(here[0], token)
            node = shm.create(
                number, len(here), token, call.left(), spin=False, backend=self.backend
            )
            self.node = node
            self._levels.append(node)
        color = number if number < self._senders else None
        self.inter_node = self._split(call, color, self.rank)
        if self.inter_node is not None:
            self._levels.append(cast(_Level, self.inter_node))

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        return self._hosts

    def _zeros(self, handshake: Handshake, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        try:
            return self.node.empty(like.shape, like.dtype)
        except CommunicatorError as error:
            self._explain(handshake, self.node, error)

    def _all_reduce(
        self, call: Call, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        size, within = source.array.nbytes, partial_op(op)
        chunks = _chunks(source)
        mine: list[Any] = [None] * len(chunks)  # this rank's slice of each chunk

        def scatter(chunk: int) -> Ready | None:
            array = widen(source.array[chunks[chunk]], source.dtype)
            counts = self._slices(array.size, size)
            mine[chunk] = np.empty(counts[self.node.rank], array.dtype)
            arguments = array, mine[chunk], counts, within
            return self._begin(handshake, self.node, "reduce_scatter", *arguments)

        def between(chunk: int) -> Ready | None:
            if self.inter_node is None or not self._sends(mine[chunk].size):
                return None
            return self._begin(handshake, self.inter_node, "all_reduce", mine[chunk], within)

        def gather(chunk: int) -> Ready | None:
            out = target.array[chunks[chunk]]
            result = finish(mine[chunk], target.dtype, op, self.size)
            counts = self._slices(out.size, size)
            return self._begin(handshake, self.node, "all_gather", result, out, counts)

        with self._by_levels(call) as handshake:
            _pipeline(handshake, len(chunks), [scatter, between, gather])

    def _broadcast(self, call: Call, data: HostElements, root: int) -> None:
        size = data.array.nbytes
        chunks = _chunks(data)
        mine: list[Any] = [None] * len(chunks)
        home = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        first = self._hosts[home].index(root)  # the root's number in its node

        def scatter(chunk: int) -> Ready | None:
            part = data.array[chunks[chunk]]
            counts, none = self._slices(part.size, size), [0] * self.node.size
            own = counts[self.node.rank]
            mine[chunk] = np.empty(own, part.dtype)
            if home != self._host:  # The ranks of this node only compare the call, once.
                if chunk:
                    return None
                nothing = part[:0], mine[chunk][:0], none, none
                return self._begin(handshake, self.node, "all_to_all", *nothing)
            sent = counts if self.rank == root else none
            received = [*none[:first], own, *none[first + 1 :]]
            arguments = part[: sum(sent)], mine[chunk], sent, received
            return self._begin(handshake, self.node, "all_to_all", *arguments)

        def between(chunk: int) -> Ready | None:
            if self.inter_node is None or not self._sends(mine[chunk].size):
                return None
            return self._begin(handshake, self.inter_node, "broadcast", mine[chunk], home)

        def gather(chunk: int) -> Ready | None:
            part = data.array[chunks[chunk]]
            if home == self._host:
                return self._begin(handshake, self.node, "broadcast", part, first)
            counts = self._slices(part.size, size)
            return self._begin(handshake, self.node, "all_gather", mine[chunk], part, counts)

        with self._by_levels(call) as handshake:
            _pipeline(handshake, len(chunks), [scatter, between, gather])

    def _all_gather(
        self, call: Call, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        sizes = [[counts[rank] for rank in ranks] for ranks in self._hosts]
        slices = [self._shares(sum(size), target.array.nbytes) for size in sizes]  # [host][sender]
        by_sender = [[lengths[i] for lengths in slices] for i in range(self._senders)]
        totals = [*map(sum, by_sender), *self._idle]
        number, kind = self.node.rank, source.array.dtype
        block = np.empty(sum(sizes[self._host]), kind)  # the data of this host's ranks
        mine = np.empty(totals[number], kind)
        everything = np.empty(sum(totals), kind)
        with self._by_levels(call) as handshake:
            gather = partial(self._do, handshake, self.node, "all_gather")
            gather(source.array, block, sizes[self._host])
            if self.inter_node is not None and self._sends(mine.size):
                own = cut(block, slices[self._host])[number]
                lengths = by_sender[number]
                self._do(handshake, self.inter_node, "all_gather", own, mine, lengths)
            gather(mine, everything, totals)
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
        sizes = [[counts[rank] for rank in ranks] for ranks in self._hosts]
        slices = [self._shares(sum(size), source.array.nbytes) for size in sizes]  # [host][sender]
        by_rank = cut(source.array, counts)
        by_host = [
            cut(np.concatenate([by_rank[rank] for rank in ranks]), lengths)
            for ranks, lengths in zip(self._hosts, slices, strict=True)
        ]
        ordered = np.concatenate([part[i] for i in range(self._senders) for part in by_host])
        array = widen(ordered, source.dtype)
        by_sender = [[lengths[i] for lengths in slices] for i in range(self._senders)]
        totals = [*map(sum, by_sender), *self._idle]
        number, within, own = self.node.rank, partial_op(op), slices[self._host]
        mine = np.empty(totals[number], array.dtype)
        reduced = np.empty([*own, *self._idle][number], array.dtype)
        block = np.empty(sum(own), array.dtype)
        with self._by_levels(call) as handshake:
            reduce, node = "reduce_scatter", self.node
            self._do(handshake, node, reduce, array, mine, totals, within)
            if self.inter_node is not None and self._sends(mine.size):
                lengths = by_sender[number]
                self._do(handshake, self.inter_node, reduce, mine, reduced, lengths, within)
            self._do(handshake, node, "all_gather", reduced, block, [*own, *self._idle])
            result = cut(block, sizes[self._host])[number]
            target.array[...] = finish(result, target.dtype, op, self.size)

    # Operations of the levels.

    @contextmanager
    def _by_levels(self, call: Call) -> Iterator[Handshake]:
        """Yield the handshake of an operation that the levels perform in the block."""
        handshake = self._handshake(call)
        handshake.begin()
        for level in self._levels:
            level.purpose = str(call)
        try:
            yield handshake
        finally:
            for level in self._levels:
                level.purpose = ""
        handshake.conclude()
        self._done(handshake, call)

    def _begin(
        self, handshake: Handshake, level: Communicator, operation: str, *arguments: Any
    ) -> Ready:
        """Begin an operation of a level."""
        try:
            work = getattr(level, operation)(
                *arguments, async_op=True, timeout=handshake.call.left() + _MORE
            )
        except CommunicatorError as error:
            self._explain(handshake, level, error)
        assert work is not None

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

    def _do(
        self, handshake: Handshake, level: Communicator, operation: str, *arguments: Any
    ) -> None:
        handshake.wait_for(self._begin(handshake, level, operation, *arguments))

    def _explain(
        self, handshake: Handshake, level: Communicator, error: CommunicatorError
    ) -> NoReturn:
        handshake.explain(self._in_world(level, error))

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

    def _sends(self, count: int) -> bool:
        """Return whether this rank takes part between nodes; the first one always does."""
        return count > 0 or self.node.rank == 0

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


def _pipeline(handshake: Handshake, chunks: int, stages: Sequence[Stage]) -> None:
    """Run all stages on all chunks, one chunk in each stage, in the same order on all ranks."""
    begun: dict[int, Ready | None] = {}  # by chunk
    for tick in range(chunks + len(stages)):
        for number in range(len(stages) + 1):
            chunk = tick - number
            if 0 <= chunk < chunks:
                if (ready := begun.pop(chunk, None)) is not None:
                    handshake.wait_for(ready)
                if number < len(stages):
                    begun[chunk] = stages[number](chunk)
