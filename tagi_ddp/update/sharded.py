"""The step of sharded replicas: each rank caps and applies its part, and all take the results.

Sums of deltas are scattered instead of sent to all, and posteriors gathered: as many bytes travel,
and 1 / ranks of the work on parameters is left to each. The same bits as without.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tagi_ddp._backend import Agreement, Contribution, ShmCommunicator, shards, update_sharded
from tagi_ddp.replica.staging import host_bucket
from tagi_ddp.trace.timeline import traced
from tagi_ddp.update.exchange import HostExchange, InMemory, Setting, shown_in_memory, vote


class InSharedMemory(InMemory):
    """Over shared memory, in one call: a rank finds the deltas of its part in all buckets."""

    def __init__(self, setting: Setting, communicator: ShmCommunicator) -> None:
        """Pack deltas into a bucket, unless they lie in one."""
        super().__init__(setting)
        self._memory = communicator
        self._in_place = setting.bucket is not None
        self._bucket = (
            host_bucket(communicator, self._parameters.size)
            if setting.bucket is None
            else setting.bucket
        )

    def _exchange(self, own: Contribution) -> Agreement:
        if own.batch and not self._in_place:
            self._parameters.pack(self._bucket)
        return shown_in_memory(
            self._memory,
            partial(
                update_sharded, self._memory, self._parameters, self._bucket, own, self._average
            ),
        )


class Scattered(HostExchange):
    """Over any communicator of hosts: agree, scatter sums of deltas, apply, gather posteriors."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        size = setting.replica.parameters.size
        bucket = np.zeros(2 * size, np.float32)
        self._bucket = bucket
        shards_of_ranks = shards(size, setting.communicator.size)
        self._counts = [2 * count for _, count in shards_of_ranks]
        # Of each rank [means | variances] of its part.
        self._parts = [
            (begin, bucket[2 * begin : 2 * (begin + count)]) for begin, count in shards_of_ranks
        ]

    def _exchange(self, own: Contribution) -> Agreement:
        communicator, parameters = self._communicator, self._replica.parameters
        agreement = vote(communicator, own)
        if not agreement.applies:
            return agreement
        if own.batch == 0:
            self._bucket.fill(0)
        else:
            for begin, part in self._parts:
                parameters.pack_shard(part, begin)
        begin, part = self._parts[communicator.rank]
        mine = np.empty_like(part)
        self._reduce(mine)
        divisor, cap = agreement.divisor(self._average), agreement.cap(self._average)
        parameters.apply_shard(mine, begin, divisor, cap)
        self._gather(mine)
        for rank, (begin, part) in enumerate(self._parts):
            if rank != communicator.rank:
                parameters.take_shard(part, begin)
        return agreement

    @traced("reducing")
    def _reduce(self, mine: np.ndarray) -> None:
        self._communicator.reduce_scatter(self._bucket, mine, self._counts)

    @traced("gathering")
    def _gather(self, mine: np.ndarray) -> None:
        self._communicator.all_gather(mine, self._bucket, self._counts)
