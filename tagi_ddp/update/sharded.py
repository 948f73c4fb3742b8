"""The step of sharded replicas: each rank caps and applies its part, and all take the results.

Sums of deltas are scattered instead of sent to all, and posteriors gathered: as many bytes travel,
and 1 / ranks of the work on parameters is left to each. The same bits as without.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tagi_ddp._backend import (
    Agreement,
    Contribution,
    Parameters,
    ShmCommunicator,
    shards,
    update_sharded,
)
from tagi_ddp.communicators import Communicator
from tagi_ddp.replica.bucket import make_bucket
from tagi_ddp.update.exchange import (
    MOST_FUSED_RANKS,
    Exchange,
    OnDevice,
    agree,
    make_exchange,
)


def make_sharded_exchange(
    communicator: Communicator, replica: Any, bucket: np.ndarray | None = None
) -> Exchange:
    """Return the fastest sharded exchange, as `make_exchange` does without shards."""
    if communicator.size == 1:
        return make_exchange(communicator, replica, bucket)
    if isinstance(replica.parameters, Parameters):
        if isinstance(communicator, ShmCommunicator):
            if bucket is None and communicator.size <= MOST_FUSED_RANKS:
                # Deltas in the engine's layers go through the cache chunk by chunk, which takes
                # two thirds of the time of a bucket that is packed and shared.
                return make_exchange(communicator, replica)
            return _InSharedMemory(communicator, replica, bucket)
    elif communicator.device != "cpu":
        from tagi_ddp.replica.device_shards import DeviceShards

        shards_there = DeviceShards(replica.parameters, communicator)
        return OnDevice(communicator, replica, shards_there)
    return _Scattered(communicator, replica)


class _InSharedMemory(Exchange):
    """Over shared memory, in one call: a rank finds the deltas of its part in all buckets."""

    def __init__(
        self, communicator: ShmCommunicator, replica: Any, bucket: np.ndarray | None
    ) -> None:
        super().__init__(communicator, replica.statistics)
        self._in_place = bucket is not None
        self._bucket = make_bucket(communicator, replica.parameters) if bucket is None else bucket

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        if contribution.batch and not self._in_place:
            parameters.pack(self._bucket)
        return update_sharded(self._communicator, parameters, self._bucket, contribution, average)


class _Scattered(Exchange):
    """Over any communicator of hosts: agree, scatter sums of deltas, apply, gather posteriors."""

    def __init__(self, communicator: Communicator, replica: Any) -> None:
        super().__init__(communicator, replica.statistics)
        size = replica.parameters.size
        bucket = np.zeros(2 * size, np.float32)
        self._bucket = bucket
        shards_of_ranks = shards(size, communicator.size)
        self._counts = [2 * count for _, count in shards_of_ranks]
        # Of each rank [means | variances] of its part.
        self._parts = [
            (begin, bucket[2 * begin : 2 * (begin + count)]) for begin, count in shards_of_ranks
        ]

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        communicator = self._communicator
        agreement = agree(communicator, contribution)
        if not agreement.applies:
            return agreement
        if contribution.batch == 0:
            self._bucket.fill(0)
        else:
            for begin, part in self._parts:
                parameters.pack_shard(part, begin)
        begin, part = self._parts[communicator.rank]
        own = np.empty_like(part)
        communicator.reduce_scatter(self._bucket, own, self._counts)
        parameters.apply_shard(own, begin, agreement.divisor(average), agreement.cap(average))
        communicator.all_gather(own, self._bucket, self._counts)
        for rank, (begin, part) in enumerate(self._parts):
            if rank != communicator.rank:
                parameters.take_shard(part, begin)
        return agreement
