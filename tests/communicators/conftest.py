"""The ranks on which tests of communicators run: the marker ``ranks`` at a test names them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("contract")

from contract.ranks import Ranks, ranks_of  # noqa: E402
from support.rank_pool import Nursery, RankPool, doomed_pool  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on the ranks that the markers ``ranks`` of its class name."""
    if "ranks" in metafunc.fixturenames:
        slow = metafunc.definition.get_closest_marker("slow") is not None
        marks = metafunc.definition.iter_markers("ranks")
        found = [ranks_of(*mark.args, slow=slow, **mark.kwargs) for mark in marks]
        assert found, f"no marker ranks at {metafunc.definition.nodeid}"
        metafunc.parametrize("ranks", [each for some in reversed(found) for each in some])


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[Any, RankPool]]:
    """The running pools; at the end no process and no shared memory is left."""
    before = shared_memory()
    running: dict[Any, RankPool] = {}
    yield running
    for pool in running.values():
        pool.close()
    Nursery.close_shared()
    deadline = time.monotonic() + 10
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("*tagi*") if not path.is_dir()}


@pytest.fixture
def size(ranks: Ranks) -> int:
    """The number of ranks of the test."""
    return ranks.size


@pytest.fixture
def pool(request: pytest.FixtureRequest, pools: dict[Any, RankPool], ranks: Ranks) -> RankPool:
    """The processes of the test's ranks, which other tests use as well."""
    key = replace(ranks, size=ranks.most)
    if key not in pools:
        pools[key] = RankPool(ranks.backend, ranks.most, **ranks.arguments(request))
    return pools[key]


@pytest.fixture
def doomed(request: pytest.FixtureRequest, ranks: Ranks) -> Iterator[RankPool]:
    """Processes of this test alone, which may die."""
    with doomed_pool(ranks.backend, ranks.size, **ranks.arguments(request)) as pool:
        yield pool
