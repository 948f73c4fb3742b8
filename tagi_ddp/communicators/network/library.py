"""The few calls of another library that moves the data between ranks on a network."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Ready


class Library(Protocol):
    """The collectives and messages of a library, over connections of their own.

    Arrays are flat and of one dtype. All ranks make the same calls, which have been compared. Each
    method begins an operation, which may take ``limit`` seconds, and returns what waits for it and
    may raise a RuntimeError.
    """

    name: str
    """Of the backend."""

    concurrent: bool
    """Operations may be called from another thread than that of the script."""

    @property
    def reducible(self) -> Collection[str]:
        """The dtypes, as numpy names them, of which it can make sums, minima and maxima."""
        ...

    few: int
    """Bytes of each rank that `compare` can bring together at the same time; 0: none."""

    def compare(
        self, digest: bytes, data: np.ndarray | None = None
    ) -> tuple[Ready | None, np.ndarray]:
        """Begin to compare 8 bytes of all ranks, and to bring together at most ``few`` others.

        Either all ranks give ``data``, some perhaps no bytes, or none does. Returns what waits, and
        may raise `Differ`, and then the data of all ranks in rows of ``few`` bytes. None: the
        control channel compares calls faster.
        """
        ...

    def all_reduce(self, array: np.ndarray, op: ReduceOp, limit: float) -> Ready:
        """Reduce the arrays of all ranks in place, of a dtype that is `reducible`.

        A mean is left a sum. All ranks get the same bits, but for those of a NaN.
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

        ``most`` elements are sent by any rank to another at most, the same number on all ranks.
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
        """Free everything; unless ``clean``, without waiting for what may be stuck."""
        ...
