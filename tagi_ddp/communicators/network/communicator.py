"""Ranks on any hosts: their calls are compared, then a library moves the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tagi_ddp.communicators.buffers import HostElements, cut, elements
from tagi_ddp.communicators.communicator import Communicator, ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.errors import Mismatch
from tagi_ddp.communicators.network.checked import CheckedCommunicator, Connect
from tagi_ddp.communicators.operations import Call, Ready
from tagi_ddp.communicators.reduce import encode, finish, reduce_rows, same_nan, widen
from tagi_ddp.communicators.topology import Topology


class Library(Protocol):
    """The collectives and messages of a library, over connections of their own.

    Arrays are flat and of one dtype. All ranks make the same calls, which have been compared. Each
    method begins an operation, which may take ``limit`` seconds, and returns a function that waits
    for it and may raise a RuntimeError.
    """

    concurrent: bool
    """True if operations may be called from another thread than that of the script."""

    @property
    def reducible(self) -> Collection[str]:
        """The dtypes, by numpy's names, that it can reduce by sum, minimum and maximum."""
        ...

    few: int
    """The bytes of each rank that `compare` can gather at the same time; 0: none."""

    def compare(
        self, handshake: Handshake, data: np.ndarray | None = None
    ) -> tuple[Ready | None, np.ndarray]:
        """Begin to compare the digests of all ranks' handshakes, and to gather their ``data``.

        Either all ranks pass ``data``, at most ``few`` bytes each, or none does. Returns a function
        that waits and may raise `Differ`, and the data in rows of ``few`` bytes, by rank. None for
        the function: the control channel compares calls faster.
        """
        ...

    def all_reduce(self, array: np.ndarray, op: ReduceOp, limit: float) -> Ready:
        """Reduce the arrays of all ranks in place, of a dtype that is `reducible`.

        A mean remains a sum. All ranks get the same bits, except those of a NaN.
        """
        ...

    def broadcast(self, array: np.ndarray, root: int, limit: float) -> Ready:
        """Copy the array of ``root`` to all."""
        ...

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Ready:
        """Concatenate the arrays of all ranks, of ``counts`` elements, in ``out``."""
        ...

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        most: int,
        limit: float,
    ) -> Ready:
        """Send ``sent[r]`` elements to each rank r and receive ``received[r]`` from it.

        No rank sends more than ``most`` elements to another. ``most`` is equal on all ranks.
        """
        ...

    def send(self, array: np.ndarray, dst: int, limit: float) -> Ready:
        """Send to ``dst``, which receives now."""
        ...

    def recv(self, array: np.ndarray, src: int, limit: float) -> Ready:
        """Receive from ``src``, which sends now."""
        ...

    def part(self, ranks: list[int], channel: ControlChannel, call: Call) -> Library:
        """Connect some of the ranks, all of which call this now; ``channel`` is theirs."""
        ...

    def close(self, clean: bool) -> None:
        """Free everything; unless ``clean``, do not wait for operations that may be stuck."""
        ...


PartOf = Callable[["NetworkCommunicator", Call, list[int], str, Connect], Communicator]
"""Connects some ranks of a communicator; see `CheckedCommunicator._part`."""

OpenLibrary = Callable[[ControlChannel, Call], Library]
"""Connects the ranks of a control channel by a library; errors name the call."""

_PIECE = 1 << 23  # bytes of each rank that a reduce_scatter receives at a time


@dataclass(frozen=True)
class Sites:
    """The locations of ranks, and the means by which they communicate there.

    memory: the ranks of a host share its memory. levels: ranks use two levels if there are several
    hosts and some ranks share one.
    """

    topology: Topology
    memory: bool
    levels: bool

    @property
    def in_memory(self) -> bool:
        """True if all ranks run on one host and share its memory."""
        return self.memory and self.topology.one_host

    @property
    def two_levels(self) -> bool:
        """True if the ranks use two levels."""
        locations = self.topology.locations
        return self.memory and self.levels and len({one.host for one in locations}) < len(locations)

    def part(self, ranks: Sequence[int]) -> Sites:
        """Return the sites of some ranks."""
        locations = tuple(self.topology.locations[rank] for rank in ranks)
        return replace(self, topology=Topology(locations))


class NetworkCommunicator(CheckedCommunicator[HostElements, None]):
    """A rank whose data a library moves, once all ranks have made the same call."""

    _elements = staticmethod(elements)

    library: Library
    """The library that moves the data; `open` makes it."""

    def __init__(
        self, backend: str, timeout: float, channel: ControlChannel, sites: Sites, part_of: PartOf
    ) -> None:
        """Make a rank of the group of ``channel``; call `open` next."""
        self.backend, self._part_of = backend, part_of
        super().__init__(channel.rank, len(sites.topology.locations), timeout, channel)
        self.sites = sites

    def open(self, open_library: OpenLibrary, call: Call) -> None:
        """Connect the ranks by a library; errors name ``call``."""
        self.library = open_library(self._channel, call)
        self.concurrent = self.library.concurrent

    def empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float32"
    ) -> npt.NDArray[Any]:
        """Return zeros, in shared memory if the ranks of this host have it."""

        def allocate() -> npt.NDArray[Any]:
            handshake = self._enter(call)
            zeros = self._zeros(handshake, like)
            handshake.leave()
            return zeros

        like = np.empty(shape, dtype)
        call = self._call("empty", f"{like.dtype.name}{list(like.shape)}", None)
        return self._submit(call, allocate, False).result()

    def _zeros(self, handshake: Handshake, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.zeros_like(like)

    def _all_reduce(
        self, call: Call, source: HostElements, target: HostElements, op: ReduceOp
    ) -> None:
        if 0 < source.array.nbytes <= self.library.few:
            rows = self._gather_few(call, source.array, source.count)
            reduce_rows(rows, source.dtype, op, target.array, self.size)
            return
        handshake = self._enter(call)
        total = widen(source.array, source.dtype)
        if total is source.array:
            total = target.array
            if target.address != source.address:
                total[...] = source.array
        if total.size:
            encoded, decode = encode(total, op, self.library.reducible)
            handshake.wait_for(self.library.all_reduce(encoded, op, call.left()))
            if encoded is not total:
                total[...] = decode(encoded)
            same_nan(total)
        result = finish(total, target.dtype, op, self.size)
        if result is not target.array:
            target.array[...] = result
        handshake.leave()

    def _reduce_scatter(
        self,
        call: Call,
        source: HostElements,
        target: HostElements,
        counts: list[int],
        op: ReduceOp,
    ) -> None:
        handshake = self._enter(call)
        slices = cut(source.array, counts)
        step = max(1, _PIECE // source.array.itemsize)
        for begin in range(0, max(counts), step):
            pieces = [each[begin : begin + step] for each in slices]
            own = pieces[self.rank]
            sent = [piece.size for piece in pieces]
            rows = np.empty((self.size, own.size), own.dtype)
            packed, flat = np.concatenate(pieces), rows.reshape(-1)
            received = [own.size] * self.size
            exchange = self.library.all_to_all
            handshake.wait_for(exchange(packed, flat, sent, received, max(sent), call.left()))
            out = target.array[begin : begin + step]
            reduce_rows(list(rows), source.dtype, op, out, self.size)
        handshake.leave()

    def _broadcast(self, call: Call, data: HostElements, root: int) -> None:
        handshake = self._enter(call)
        if data.count:
            handshake.wait_for(self.library.broadcast(data.array, root, call.left()))
        handshake.leave()

    def _all_gather(
        self, call: Call, source: HostElements, target: HostElements, counts: list[int]
    ) -> None:
        if 0 < max(counts) * target.array.itemsize <= self.library.few:
            rows = self._gather_few(call, source.array, max(counts))
            for part, row in zip(cut(target.array, counts), rows, strict=True):
                part[...] = row[: part.size]
            return
        handshake = self._enter(call)
        if target.count:
            handshake.wait_for(
                self.library.all_gather(source.array, target.array, counts, call.left())
            )
        handshake.leave()

    def _all_to_all(
        self,
        call: Call,
        source: HostElements,
        target: HostElements,
        sent: list[int],
        received: list[int],
    ) -> None:
        handshake = self._handshake(call)
        tables = handshake.gather([sent, received])
        for a in range(self.size):
            for b in range(self.size):
                sends, expects = tables[a][0][b], tables[b][1][a]
                if sends != expects:
                    raise Mismatch(
                        f"{self._where(call.title)}: rank {a} sends {sends} elements to rank {b}, "
                        f"which expects {expects}. Make what a rank sends what the other expects.",
                        [rank for rank in (a, b) if rank != self.rank],
                    )
        if most := max(max(sends) for sends, _ in tables.values()):
            handshake.wait_for(
                self.library.all_to_all(
                    source.array, target.array, sent, received, most, call.left()
                )
            )
        handshake.leave()

    def _transfer(self, handshake: Handshake, data: HostElements, peer: int) -> None:
        transfer = self.library.send if handshake.call.name == "send" else self.library.recv
        if data.count:
            handshake.wait_for(transfer(data.array, peer, handshake.call.left()))

    def _part(self, call: Call, ranks: list[int], token: str, connect: Connect) -> Communicator:
        return self._part_of(self, call, ranks, token, connect)

    def _enter(self, call: Call) -> Handshake:
        """Return the handshake for ``call`` once all ranks have made the same call."""
        handshake = self._handshake(call)
        handshake.compare(self.library.compare(handshake)[0])
        return handshake

    def _gather_few(self, call: Call, array: np.ndarray, most: int) -> list[np.ndarray]:
        """Return ``most`` elements of each rank, gathered in one step with the comparison."""
        handshake = self._handshake(call)
        ready, rows = self.library.compare(handshake, array.view(np.uint8))
        handshake.compare(ready)
        handshake.leave()
        return [row[: most * array.itemsize].view(array.dtype) for row in rows]

    def _library_close(self, clean: bool) -> None:
        if hasattr(self, "library"):  # Else `open` has failed.
            self.library.close(clean)
