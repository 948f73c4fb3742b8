"""The interface of a library that moves data between ranks on a network."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.operations import Call, Ready


class Library(Protocol):
    """The collectives and messages of a library, over connections of their own.

    Arrays are flat and of one dtype. All ranks make the same calls, which have been compared. Each
    method begins an operation, which may take ``limit`` seconds, and returns a function that waits
    for it and may raise a RuntimeError.
    """

    name: str
    """The name of the backend."""

    concurrent: bool
    """True if operations may be called from another thread than that of the script."""

    @property
    def reducible(self) -> Collection[str]:
        """The dtypes, by numpy's names, that it can reduce by sum, minimum and maximum."""
        ...

    few: int
    """The bytes of each rank that `compare` can gather at the same time; 0: none."""

    def compare(
        self, digest: bytes, data: np.ndarray | None = None
    ) -> tuple[Ready | None, np.ndarray]:
        """Begin to compare the 8 bytes ``digest`` of all ranks, and to gather their ``data``.

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
