"""The exchange of sharded replicas: each rank updates its part, and all gather the results.

Sums of deltas are scattered instead of sent to all, and posteriors are gathered: this sends as many
bytes, and each rank has 1 / ranks of the work on parameters. The results are the same bits.
"""

from __future__ import annotations

import numpy as np

from tagi_ddp._backend import Contribution, shards
from tagi_ddp.trace.timeline import traced
from tagi_ddp.update.exchange import Exchange, Setting


class Scattered(Exchange):
    """An exchange by the host: agree, scatter sums of deltas, apply, gather posteriors."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        size = setting.replica.parameters.size
        bucket = np.zeros(2 * size, np.float32)
        self._bucket = bucket
        shards_of_ranks = shards(size, setting.communicator.size)
        self._counts = [2 * count for _, count in shards_of_ranks]
        # The parts of the ranks, [means | variances], and their begins.
        self._parts = [
            (begin, bucket[2 * begin : 2 * (begin + count)]) for begin, count in shards_of_ranks
        ]

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Agree, scatter sums, apply this rank's part, and gather the posteriors."""
        communicator, parameters = self._communicator, self._replica.parameters
        culprit = parameters.first_not_finite() if samples else ""
        agreement = self._vote(Contribution(samples, not culprit, finished))
        if agreement.applies:
            if samples == 0:
                self._bucket.fill(0)
            else:
                for begin, part in self._parts:
                    parameters.pack_shard(part, begin)
            begin, part = self._parts[communicator.rank]
            mine = np.empty_like(part)
            self._reduce(mine)
            divisor, batch = agreement.divisor(self._average), agreement.capped_as(self._average)
            parameters.apply_shard(mine, begin, divisor, batch)
            self._gather(mine)
            for rank, (begin, part) in enumerate(self._parts):
                if rank != communicator.rank:
                    parameters.take_shard(part, begin)
        return self._end(samples, agreement, culprit)

    @traced("reducing")
    def _reduce(self, mine: np.ndarray) -> None:
        self._communicator.reduce_scatter(self._bucket, mine, self._counts)

    @traced("gathering")
    def _gather(self, mine: np.ndarray) -> None:
        self._communicator.all_gather(mine, self._bucket, self._counts)
