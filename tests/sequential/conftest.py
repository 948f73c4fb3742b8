"""The pools of processes of the communicators' tests, for whole models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1])]

from rank_pool import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def shm() -> Iterator[RankPool]:
    """Up to four ranks over shared memory."""
    pool = RankPool("shm", 4)
    yield pool
    pool.close()
