"""The pools of processes that the tests of sharding share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="package")
def gloo() -> Iterator[RankPool]:
    pool = RankPool("gloo", 3)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def mpi() -> Iterator[RankPool]:
    pool = RankPool("mpi", 2)
    yield pool
    pool.close()
