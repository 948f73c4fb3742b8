"""Sums of changes in few bits, with error feedback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tagi_ddp._backend import COMPRESS_BLOCK
from tagi_ddp.communicators import Communicator
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica import Replica
from tagi_ddp.replica.codec import Codec
from tagi_ddp.replica.staging import as_array, staged

Compress = Literal["bf16", "int8"]
BITS: dict[str, int] = {"bf16": 16, "int8": 8}


class Pending(Protocol):
    """A sum in progress."""

    def wait(self) -> None:
        """Wait until the sum is complete."""
        ...


class CompressedSum:
    """A sum of changes over the ranks of a group; what rounding drops is sent the next time.

    Each rank sends the parts of its change to the ranks that sum them in full precision, and these
    send the sums to all. So a rank sends and receives two compressed changes, however many ranks
    there are, and all get the same bits (Tang et al. 2019, "DoubleSqueeze", arXiv:1905.06957). On
    the wire, precisions and means are in units of the prior: numbers of a block have similar sizes.

    The residual, which rounding has dropped, is kept as a change of natural parameters, because
    those units stay the same when the prior changes. Its weighted means are relative to the means
    of the prior at the last `start`, and are converted at the next one.

    Arrays of all ranks' parts have the shape (ranks, 2, width): for each rank's parameters their
    precisions and their weighted means, padded with zeros to whole blocks.
    """

    def __init__(self, communicator: Communicator, replica: Replica, compress: Compress) -> None:
        self._communicator, self._device = communicator, replica.device
        self._codec = codec = Codec(BITS[compress])
        self._size = replica.parameters.size
        blocks = -(-self._size // (communicator.size * COMPRESS_BLOCK))
        self._width = blocks * COMPRESS_BLOCK
        # The residuals of this rank's changes, and of the sums that it makes.
        self._own = codec.floats(communicator.size * 2 * self._width)
        self._part = codec.floats(2 * self._width)
        self._means = codec.floats(self._size)  # of the prior at the last `start`

    def restart(self) -> None:
        """Drop the residual."""
        self._own[:] = self._part[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for `load_state_dict`."""
        return {
            "own": self._own,
            "part": self._part,
            "means": self._means,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank.

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
        self._own[:] = state["own"]
        self._part[:] = state["part"]
        self._means[:] = state["means"]

    def start(self, change: FloatArray, description: FloatArray, before: FloatArray) -> Pending:
        """Start to sum ``change`` since Gaussians ``before``; ``description`` is summed exactly."""
        codec, ranks = self._codec, self._communicator.size
        units = self._rows(codec.units(before))
        units[units == 0] = 1  # the padding
        self._refer_to(before[: self._size])
        scaled = (self._own + self._rows(change)) * units
        exact = codec.floats(-(-len(description) // ranks) * ranks)
        exact[: len(description)] = description
        message = codec.join(codec.compress(scaled), exact, ranks)
        self._own = scaled / units
        sent = staged(self._communicator, message, self._device)
        rows = sent * 0
        work = self._communicator.all_to_all(sent, rows, async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            total, exactly = self._sum(as_array(rows), len(exact) // ranks, units)
            self._halves(total / units, change)
            description[:] = exactly[: len(description)]

        return Finishing(finish)

    def _sum(
        self, rows: FloatArray, exact: int, units: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Sum the parts of all ranks, send the sums to all, and return them."""
        codec, exactly = self._codec, self._codec.floats(exact)
        own_units = units.reshape(self._communicator.size, -1)[self._communicator.rank]
        sums = self._part * own_units
        for row in rows:
            compressed, floats = codec.split(row[None], exact)
            codec.add(compressed, sums)
            exactly += floats
        part = codec.join(codec.compress(sums), exactly, 1)
        self._part = sums / own_units
        gathered = staged(self._communicator, rows * 0, self._device)
        self._communicator.all_gather(staged(self._communicator, part, self._device), gathered)
        compressed, exactly = codec.split(as_array(gathered), exact)
        total = codec.floats(len(self._own))
        codec.add(compressed, total)
        return total, exactly

    def _refer_to(self, means: FloatArray) -> None:
        """Make the residuals, which are relative to `_means`, relative to ``means``."""
        rank, ranks = self._communicator.rank, self._communicator.size
        moved = self._codec.floats(ranks * self._width)
        moved[: self._size] = self._means - means
        moved = moved.reshape(ranks, self._width)
        own, part = self._own.reshape(ranks, 2, -1), self._part.reshape(2, -1)
        own[:, 1] += own[:, 0] * moved
        part[1] += part[0] * moved[rank]
        self._means[:] = means

    def _rows(self, halves: FloatArray) -> FloatArray:
        """Return [precisions | weighted means] as a flat array of all ranks' parts."""
        ranks = self._communicator.size
        rows = self._codec.floats(len(self._own))
        for half in range(2):
            padded = self._codec.floats(ranks * self._width)
            padded[: self._size] = halves[half * self._size : (half + 1) * self._size]
            rows.reshape(ranks, 2, -1)[:, half] = padded.reshape(ranks, -1)
        return rows

    def _halves(self, rows: FloatArray, out: FloatArray) -> None:
        """Write ``rows``, as `_rows` returns them, to ``out`` as [precisions | weighted means]."""
        parts = rows.reshape(self._communicator.size, 2, -1)
        for half in range(2):
            whole = parts[:, half].reshape(-1)
            out[half * self._size : (half + 1) * self._size] = whole[: self._size]


@dataclass
class Finishing:
    """A sum that a function completes."""

    wait: Callable[[], None]
