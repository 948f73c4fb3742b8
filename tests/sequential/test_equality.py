"""N ranks give what one process gives on the union of their shares, and equal replicas."""

from __future__ import annotations

import pytest
from support import tasks
from support.networks import EQUAL_TO_ONE_PROCESS, NETWORKS
from support.rank_pool import RankPool

# Global batches on both sides of 256, where the engine's cap factor changes; uneven shares.
SHARES = [(96,), (40, 56), (50, 151, 99)]
MORE_SHARES = [(130, 129), (150, 150), (60, 20, 16), (30, 70, 20, 137)]
SHARES += [pytest.param(shares, marks=pytest.mark.slow) for shares in MORE_SHARES]


@pytest.mark.parametrize("compute", ["engine", "torch"])
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", EQUAL_TO_ONE_PROCESS)
def test_equal_to_one_process(
    shm: RankPool, name: str, shares: tuple[int, ...], compute: str
) -> None:
    task = tasks.compare_with_one_process
    distances = shm.run(task, name, shares, {"compute": compute}, size=len(shares), limit=60)
    assert distances[0] < 1e-5


@pytest.mark.parametrize("compute", ["engine", "torch"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "shares", [pytest.param((17, 16), marks=pytest.mark.slow), (8, 9, 7, 10)], ids=str
)
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_replicas(
    shm: RankPool, name: str, shares: tuple[int, ...], average: bool, compute: str
) -> None:
    options = {"compute": compute}
    states = shm.run(tasks.replicas, name, shares, average, options, size=len(shares), limit=60)
    assert states == [states[0]] * len(shares)
