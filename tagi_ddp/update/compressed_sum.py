"""Sums of changes in few bits, with error feedback."""

from __future__ import annotations

import warnings
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

    The residual, which rounding has dropped, is kept as a change of natural parameters, because
    those units stay the same when the prior changes. Its weighted means are relative to the means
    of the prior at the last `start`, and are converted at the next one.

    Arrays of all ranks' parts have the shape (ranks, 2, width): for each rank's parameters their
    precisions and their weighted means, padded with zeros to whole blocks.
    """

    def __init__(self, communicator: Communicator, replica: Replica, compress: Compress) -> None:
        self._communicator = communicator
        self._codec = codec = replica.codec(BITS[compress])
        self._size = replica.parameters.size
        blocks = -(-self._size // (communicator.size * COMPRESS_BLOCK))
        self._width = blocks * COMPRESS_BLOCK
        # The residuals of this rank's changes, and of the sums that it makes.
        self._own = codec.floats(communicator.size * 2 * self._width)
        self._part = codec.floats(2 * self._width)
        self._means = codec.floats(self._size)  # that the residuals are relative to

    def restart(self) -> None:
        """Drop the residual."""
        self._own[:] = self._part[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on from here, on this rank."""
        return {
            "own": as_array(self._own),
            "part": as_array(self._part),
            "means": as_array(self._means),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the point at which `state_dict` was called.

        A state without means comes from a version whose residual had units that the state does not
        contain: the residual is dropped, with a RuntimeWarning.
        """
        if "means" not in state:
            warnings.warn(
                "this checkpoint comes from a version of tagi_ddp that kept the rounding error of "
                "compress= in other units: that error, less than 1 % of one merge's change, is "
                "dropped",
                RuntimeWarning,
                stacklevel=2,
            )
            self.restart()
            return
        fill(self._own, state["own"])
        fill(self._part, state["part"])
        fill(self._means, state["means"])

    def start(self, change: Buffer, description: Buffer, before: Buffer) -> Pending:
        """Begin to sum ``change`` since Gaussians ``before``; ``description`` stays exact."""
        codec, ranks = self._codec, self._communicator.size
        units = self._rows(codec.units(before))
        units[units == 0] = 1  # of the padding
        self._refer_to(before[: self._size])
        scaled = (self._own + self._rows(change)) * units
        exact = codec.floats(-(-len(description) // ranks) * ranks)
        exact[: len(description)] = description
        message = codec.join(codec.compress(scaled), exact, ranks)
        self._own = scaled / units
        sent = to_host(self._communicator, message)
        rows = sent * 0
        work = self._communicator.all_to_all(sent, rows, async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            total, exactly = self._sum(rows, len(exact) // ranks, units)
            self._halves(total / units, change)
            description[:] = exactly[: len(description)]

        return Finishing(finish)

    def _sum(self, rows: Buffer, exact: int, units: Buffer) -> tuple[Buffer, Buffer]:
        """Sum the parts of all ranks, give the sums to all, and return them."""
        codec, exactly = self._codec, self._codec.floats(exact)
        own_units = units.reshape(self._communicator.size, -1)[self._communicator.rank]
        sums = self._part * own_units
        for row in rows:
            compressed, floats = codec.split(row[None], exact)
            codec.add(compressed, sums)
            exactly += floats
        part = codec.join(codec.compress(sums), exactly, 1)
        self._part = sums / own_units
        gathered = rows * 0
        self._communicator.all_gather(to_host(self._communicator, part), gathered)
        compressed, exactly = codec.split(gathered, exact)
        total = codec.floats(len(self._own))
        codec.add(compressed, total)
        return total, exactly

    def _refer_to(self, means: Buffer) -> None:
        """Convert the residuals, relative to `_means`, to those relative to ``means``."""
        rank, ranks = self._communicator.rank, self._communicator.size
        moved = self._codec.floats(ranks * self._width)
        moved[: self._size] = self._means - means
        moved = moved.reshape(ranks, self._width)
        own, part = self._own.reshape(ranks, 2, -1), self._part.reshape(2, -1)
        own[:, 1] += own[:, 0] * moved
        part[1] += part[0] * moved[rank]
        self._means[:] = means

    def _rows(self, halves: Buffer) -> Buffer:
        """Return [precisions | weighted means] as a flat array of all ranks' parts."""
        ranks = self._communicator.size
        rows = self._codec.floats(len(self._own))
        for half in range(2):
            padded = self._codec.floats(ranks * self._width)
            padded[: self._size] = halves[half * self._size : (half + 1) * self._size]
            rows.reshape(ranks, 2, -1)[:, half] = padded.reshape(ranks, -1)
        return rows

    def _halves(self, rows: Buffer, out: Buffer) -> None:
        """Write what `_rows` returned, as [precisions | weighted means], to ``out``."""
        parts = rows.reshape(self._communicator.size, 2, -1)
        for half in range(2):
            whole = parts[:, half].reshape(-1)
            out[half * self._size : (half + 1) * self._size] = whole[: self._size]


@dataclass
class Finishing:
    """A sum that a function finishes."""

    wait: Callable[[], None]
