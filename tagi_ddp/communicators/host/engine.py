"""What moves the data of a group of ranks: another library, behind the few calls that we need."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.handshake import Handshake, Ready


class Engine(Protocol):
    """Moves flat arrays of one dtype between the ranks of a group, which all call it alike.

    A call begins what may take as long as ``handshake`` has left, and returns what waits for it.
    """

    chunks: int
    """In how many parts a sum of some ms may travel, so little does a call cost."""

    sums_meet: bool
    """Whether sums bring all ranks together, and never mix what does not fit.

    Nothing is written to before all have come. `prepare_sums` comes before.
    """

    quick: bool
    """Whether a sum that brings ranks together takes less time than messages of the handshake."""

    def prepare_sums(self, handshake: Handshake, lanes: int) -> None:
        """Let all ranks connect for sums, of which ``lanes`` ranks of each host carry parts."""
        ...

    def all_reduce(self, array: np.ndarray, op: ReduceOp, handshake: Handshake) -> Ready:
        """Reduce the arrays of all, of any type but float16, in place, to the same bits.

        A mean is left a sum.
        """
        ...

    def broadcast(self, array: np.ndarray, root: int, handshake: Handshake) -> Ready:
        """Copy the array of ``root`` to all."""
        ...

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], handshake: Handshake
    ) -> Ready:
        """Concatenate the arrays of all, of so many elements, in ``out``."""
        ...

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        handshake: Handshake,
    ) -> Ready:
        """Send so many elements to each rank, and receive so many from each, in rank order."""
        ...

    def send(self, array: np.ndarray, dst: int, handshake: Handshake) -> Ready:
        """Send to ``dst``, which receives now."""
        ...

    def recv(self, array: np.ndarray, src: int, handshake: Handshake) -> Ready:
        """Receive from ``src``, which sends now."""
        ...

    def close(self, clean: bool) -> None:
        """Free everything; unless ``clean``, without waiting for what may be stuck."""
        ...
