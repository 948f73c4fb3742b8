"""Sums of changes in few bits, with error feedback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tagi_ddp._backend import COMPRESS_BLOCK
from tagi_ddp.communicators import Buffer, Communicator
from tagi_ddp.replica.protocol import Replica
from tagi_ddp.replica.staging import as_array, fill, to_host

Compress = Literal["bf16", "int8"]
BITS: dict[str, int] = {"bf16": 16, "int8": 8}


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> None:
        """Return when it is where it should be."""
        ...


class CompressedSum:
    """Sums changes over the ranks of a group; what rounding drops is sent the next time.

    Ranks send parts of their changes to those that sum them up in full precision, and these send
    the sums to all: each rank sends and receives two changes of few bits, however many ranks there
    are, and all have the same bits (Tang et al. 2019, "DoubleSqueeze", arXiv:1905.06957). On the
    wire precisions and means are in units of the prior's, so that numbers of a block are alike.
    """

    def __init__(self, communicator: Communicator, replica: Replica, compress: Compress) -> None:
        self._communicator = communicator
        self._codec = codec = replica.codec(BITS[compress])
        ranks, size = communicator.size, 2 * replica.parameters.size
        part = -(-size // (ranks * COMPRESS_BLOCK)) * COMPRESS_BLOCK
        # What has not been sent yet: of this rank's changes, and of the sums that it makes.
        self._own, self._part = codec.floats(part * ranks), codec.floats(part)

    def restart(self) -> None:
        """Forget what has not been sent."""
        self._own[:] = self._part[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on from here, on this rank."""
        return {"own": as_array(self._own), "part": as_array(self._part)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called."""
        fill(self._own, state["own"])
        fill(self._part, state["part"])

    def start(self, change: Buffer, description: Buffer, before: Buffer) -> Pending:
        """Begin to sum ``change`` since Gaussians ``before``; ``description`` stays exact."""
        codec, ranks = self._codec, self._communicator.size
        units = codec.units(before)
        self._own[: len(change)] += change * units
        exact = codec.floats(-(-len(description) // ranks) * ranks)
        exact[: len(description)] = description
        message = codec.join(codec.compress(self._own), exact, ranks)
        sent = to_host(self._communicator, message)
        rows = sent * 0
        work = self._communicator.all_to_all(sent, rows, async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            total, exactly = self._sum(rows, len(exact) // ranks)
            change[:] = total[: len(change)] / units
            description[:] = exactly[: len(description)]

        return Finishing(finish)

    def _sum(self, rows: Buffer, exact: int) -> tuple[Buffer, Buffer]:
        """Sum the parts of all ranks, give the sums to all, and return them."""
        codec, exactly = self._codec, self._codec.floats(exact)
        for row in rows:
            compressed, floats = codec.split(row[None], exact)
            codec.add(compressed, self._part)
            exactly += floats
        part = codec.join(codec.compress(self._part), exactly, 1)
        gathered = rows * 0
        self._communicator.all_gather(to_host(self._communicator, part), gathered)
        compressed, exactly = codec.split(gathered, exact)
        total = codec.floats(len(self._own))
        codec.add(compressed, total)
        return total, exactly


@dataclass
class Finishing:
    """A sum that a function finishes."""

    wait: Callable[[], None]
