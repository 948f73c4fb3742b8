"""Ranks over NCCL: on stand-ins for its library and CUDA's, or on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from support.rank_pool import RankPool


@dataclass(frozen=True)
class Devices:
    """A pool of ranks over NCCL, and what its replicas need."""

    pool: RankPool
    replica: str | None  # of DDPSequential's device=: "cpu:0" stands in for a GPU
    rounding: float  # the distance of results that may differ by rounding
    stand_in: bool

    def ranks(self, most: int) -> int:
        """Return the number of ranks of a test: at most ``most``, and at most those of the pool."""
        return min(self.pool.size, most)
