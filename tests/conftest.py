"""The pool of processes that tests of whole models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def shm() -> Iterator[RankPool]:
    """Up to four ranks over shared memory."""
    pool = RankPool("shm", 4)
    yield pool
    pool.close()
