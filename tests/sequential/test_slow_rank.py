"""A line about a rank that is steadily slower than the others."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.networks import NETWORKS, fresh
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential
from tagi_ddp.sequential import slow_rank
from tagi_ddp.sequential.slow_rank import SlowRank


def told(seconds: list[list[float]], rank: int = 0) -> list[str]:
    """Return the lines after periods in which the ranks took these times for each of 10 steps."""
    pace = SimpleNamespace(totals=[0] * len(seconds[0]), exchanges=0)
    ranks: Any = SimpleNamespace(
        exchange=SimpleNamespace(pace=pace), communicator=SimpleNamespace(rank=rank)
    )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    slow_rank.log.addHandler(handler)
    try:
        watch, now = SlowRank(ranks), 100.0
        watch._look(now)
        for period in seconds:
            for _ in range(10):
                pace.totals = [t + round(1e9 * s) for t, s in zip(pace.totals, period, strict=True)]
                pace.exchanges += 1
            now += 6.0
            watch._look(now)
    finally:
        slow_rank.log.removeHandler(handler)
    return lines


def test_the_slow_one_is_named_with_its_time() -> None:
    (line,) = told([[0.01, 0.01, 0.03]] * 3)
    assert line == (
        "the others wait for rank 2: between two exchanges it takes 30 ms for its own work, and "
        "they take 10 ms"
    )
    assert told([[0.01, 0.01, 0.03]] * 3, rank=1) == []


def test_at_most_one_line_a_minute() -> None:
    assert len(told([[0.01, 0.03]] * 40)) == 4  # in 240 seconds


@given(st.lists(st.permutations([0.01, 0.01, 0.05]), min_size=1, max_size=10))
def test_only_the_same_rank_twice_in_a_row_is_slow(seconds: list[list[float]]) -> None:
    slow = [period.index(0.05) for period in seconds]
    steady = any(slow[i] == slow[i - 1] for i in range(1, len(slow)))
    assert bool(told(seconds)) == steady


@given(st.lists(st.lists(st.floats(0.9, 1.05), min_size=3, max_size=3), min_size=1, max_size=10))
def test_about_equal_times_are_no_news(seconds: list[list[float]]) -> None:
    assert told(seconds) == []


def busy(comm: Any, options: dict[str, Any]) -> tuple[list[float], int]:
    """Return the milliseconds that rank 0 finds for all ranks, the last of which is slow."""
    x, y = NETWORKS["mlp"].batch(0, 24)
    own = slice(comm.rank, None, comm.size)
    with DDPSequential(fresh("mlp"), communicator=comm, **options) as model:
        for _ in range(12):
            time.sleep(0.02 * (comm.rank == comm.size - 1))
            model.learn(np.ascontiguousarray(x[own]), np.ascontiguousarray(y[own]), 0.1)
        pace = model._ranks.exchange.pace
        return [1e-6 * total / pace.exchanges for total in pace.totals], pace.exchanges


SUMS: dict[str, Any] = {"average": False}


@pytest.mark.parametrize(
    ("pool", "options"),
    [
        ("shm", SUMS),
        ("shm", {**SUMS, "compute": "torch"}),
        ("shm", {"reduction": "precision", "sync_every": 2, "merge": "bayes"}),
        ("gloo", SUMS),
        ("gloo", {**SUMS, "sharded": True}),
    ],
)
def test_every_exchange_measures(
    pool: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for times, exchanges in ranks.run(busy, options, size=2):
        assert exchanges == (6 if "reduction" in options else 12)
        assert times[1] > times[0] + 10 * 12 / exchanges
