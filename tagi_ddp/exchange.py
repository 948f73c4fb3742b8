"""What happens at `step`: all ranks agree, reduce the deltas, and apply the same update."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tagi_ddp._backend import (
    Agreement,
    Contribution,
    Parameters,
    RunningStatistics,
    ShmCommunicator,
    update,
)
from tagi_ddp.communicators import Communicator

# Over shared memory every rank reads every other's deltas; with more ranks than this it is less
# work to let each reduce its share of a bucket for all.
_MOST_FUSED_RANKS = 4


class Exchange(Protocol):
    """Exchanges the deltas of all ranks and applies them; nothing is applied if a rank refuses."""

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        """Return what the ranks agreed on; `Agreement.applies` tells whether it was applied."""
        ...


def make_bucket(communicator: Communicator, parameters: Parameters) -> np.ndarray:
    """Return memory for all deltas, [means | variances], zeros; the communicator's own if it can.

    There, a reduction needs no staging.
    """
    size = 2 * parameters.size
    if isinstance(communicator, ShmCommunicator):
        bucket = communicator.empty(size)
        bucket.fill(0)
        return bucket
    return np.zeros(size, np.float32)


def make_exchange(communicator: Communicator, bucket: np.ndarray | None = None) -> Exchange:
    """Return the fastest exchange for a communicator.

    ``bucket`` is where the parameters' deltas lie, if not in the engine's layers.
    """
    if communicator.size == 1:
        return _alone
    if isinstance(communicator, ShmCommunicator) and communicator.size <= _MOST_FUSED_RANKS:
        return _Fused(communicator)
    return _Bucket(communicator, bucket)


def _alone(parameters: Parameters, contribution: Contribution, average: bool) -> Agreement:
    agreement = Agreement([contribution])
    if agreement.applies:
        parameters.apply_own(agreement.cap(average))
    return agreement


class _Fused:
    """Over shared memory, in cache-sized chunks, in one call."""

    def __init__(self, communicator: ShmCommunicator) -> None:
        self._communicator = communicator

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        return update(self._communicator, parameters, contribution, average)


class _Bucket:
    """Over any communicator: agree, reduce one bucket of all deltas, apply it."""

    def __init__(self, communicator: Communicator, bucket: np.ndarray | None = None) -> None:
        self._communicator = communicator
        self._in_place = bucket is not None
        self._bucket = bucket

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        words = np.array(
            [contribution.batch, contribution.finite, contribution.joined], dtype=np.int64
        )
        everyone = np.empty(3 * self._communicator.size, np.int64)
        self._communicator.all_gather(words, everyone)
        agreement = Agreement(
            [
                Contribution(int(batch), bool(finite), bool(joined))
                for batch, finite, joined in everyone.reshape(-1, 3)
            ]
        )
        if not agreement.applies:
            return agreement
        if self._bucket is None:
            self._bucket = make_bucket(self._communicator, parameters)
        bucket = self._bucket
        if contribution.batch == 0:
            bucket.fill(0)
        elif not self._in_place:
            parameters.pack(bucket)
        self._communicator.all_reduce(bucket)
        parameters.apply(bucket, agreement.divisor(average), agreement.cap(average))
        return agreement


class StatisticsExchange:
    """Averages the running statistics over the ranks, weighted by their batches."""

    def __init__(self, communicator: Communicator, statistics: RunningStatistics) -> None:
        """Remember what to average."""
        self._communicator = communicator
        self._statistics = statistics
        self._buffer = np.empty(statistics.size, np.float32)

    def __call__(self, batch: int, total: int) -> None:
        """Average; ``batch`` samples of this rank, ``total`` of all ranks."""
        if self._communicator.size == 1 or self._buffer.size == 0:
            return
        self._statistics.pack(self._buffer, batch)
        self._communicator.all_reduce(self._buffer)
        self._statistics.unpack(self._buffer, total)
