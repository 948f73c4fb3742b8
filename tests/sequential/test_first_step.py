"""The ranks' data in their first step: shares of one order, and not the same rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from pytagi.nn import Linear, Sequential
from support.networks import NETWORKS, fresh
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential, DistributedSampler, OutputUpdater
from tagi_ddp.communicators.equality import RanksDiffer

Rows = list[list[int]]  # of each step; those of a batch of which all ranks have a copy


def warned(comm: Any, way: str, rows: list[Rows], options: dict[str, Any]) -> list[str]:
    """Return the warnings of steps on this rank's rows; none after its last step."""
    groups = {"alone": comm.rank, "pairs": comm.rank % 2}
    group = comm.split(groups[way]) if way in groups else comm
    x, y = NETWORKS["mlp"].batch(0, 24)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with DDPSequential(fresh("mlp"), communicator=group, **options) as model, model.join():
            model.eval()
            model(x)  # which all ranks do alike
            model.train()
            for own in rows[comm.rank]:
                if way == "four calls":
                    model(x[own])
                    OutputUpdater(model).update(y[own], np.full_like(y[own], 0.1))
                    model.backward()
                    model.step()
                elif way == "micro-batches":
                    with model.no_sync():
                        model(x[own])
                        OutputUpdater(model).update(y[own], np.full_like(y[own], 0.1))
                        model.backward()
                    model.step()
                else:
                    model.learn(x[own], y[own], 0.1)
    return [str(each.message) for each in found]


FIRST, SECOND, NONE = [0, 1, 2], [3, 4, 5], list[int]()
SUMS: dict[str, Any] = {"average": False}


@pytest.mark.parametrize(
    ("way", "compute"), [("four calls", "engine"), ("learn", "native"), ("micro-batches", "torch")]
)
def test_the_same_rows(shm: RankPool, way: str, compute: str) -> None:
    """At the first step only, on rank 0."""
    rows = [[FIRST, SECOND, FIRST]] * 2
    first, second = shm.run(warned, way, rows, {**SUMS, "compute": compute}, size=2)
    assert second == []
    assert len(first) == 1
    assert first[0].startswith("2 ranks train on the same rows in the first step")
    assert "DistributedSampler(x).batches(256)" in first[0]


@pytest.mark.parametrize(
    ("way", "rows", "options", "count"),
    [
        ("learn", [[FIRST, FIRST], [SECOND, FIRST], [FIRST]], SUMS, 0),  # shares
        ("learn", [[NONE, SECOND], [FIRST, FIRST], [FIRST]], SUMS, 2),  # one has none yet
        ("learn", [[FIRST], [FIRST], []], SUMS, 2),  # one has no steps at all
        ("learn", [[FIRST, FIRST], [NONE, SECOND], []], SUMS, 0),
        ("learn", [[], [], []], SUMS, 0),
        ("learn", [[FIRST, SECOND]] * 3, {"average": True}, 0),
        ("learn", [[FIRST, SECOND]] * 3, {"reduction": "precision", "sync_every": 2}, 0),
        ("alone", [[FIRST, SECOND]] * 3, SUMS, 0),
        ("pairs", [[FIRST], [FIRST], [SECOND], [SECOND]], SUMS, 0),
        ("learn", [[FIRST, SECOND]] * 4, {**SUMS, "sharded": True}, 4),
    ],
)
def test_only_where_all_that_have_rows_have_the_same(
    shm: RankPool, way: str, rows: list[Rows], options: dict[str, Any], count: int
) -> None:
    if options.get("reduction") == "precision":
        rows = [[*each, *each] for each in rows]
    first, *others = shm.run(warned, way, rows, options, size=len(rows))
    assert [len(each) for each in others] == [0] * (len(rows) - 1)
    assert [text[:8] for text in first] == ([f"{count} ranks "] if count else [])


X = np.arange(80, dtype=np.float32).reshape(40, 2)
ORDERS: dict[str, list[dict[str, Any]]] = {
    "seed": [{}, {"seed": 1}],
    "shuffle": [{}, {"shuffle": False}],
    "length": [{}, {"dataset": X[:39]}],
    "data": [{}, {"dataset": X[::-1].copy()}],
    "global_batch_size": [{}, {"size": 12}],
}


def learn_shares(comm: Any, settings: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return the error of steps on shares that are drawn by these settings of the ranks."""
    own = {"dataset": X, "size": 10, **settings[comm.rank]}
    size = own.pop("size")
    sampler = DistributedSampler(
        own.pop("dataset"), own.pop("num_replicas", comm.size), own.pop("rank", comm.rank), **own
    )
    try:
        with DDPSequential(Sequential(Linear(2, 1)), communicator=comm, **options) as model:
            for _, share in sampler.steps(size, 2):
                model.learn(X[share], X[share, :1], 0.1)
    except RanksDiffer as error:
        return str(error)
    return ""


REDUCTIONS: list[dict[str, Any]] = [
    SUMS,
    {"average": True},
    {"reduction": "precision", "sync_every": 2},
]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("options", REDUCTIONS, ids=["sum", "mean", "merges"])
def test_shares_of_different_orders(shm: RankPool, name: str, options: dict[str, Any]) -> None:
    for text in shm.run(learn_shares, ORDERS[name], options, size=2):
        assert text.startswith(f"the ranks' samplers differ, first at {name} of rank 1: "), text


@pytest.mark.parametrize("options", REDUCTIONS, ids=["sum", "mean", "merges"])
def test_data_of_their_own(shm: RankPool, options: dict[str, Any]) -> None:
    """And equal orders, and a data set without rows that can be compared."""
    alone = {"num_replicas": 1, "rank": 0}
    for settings in (
        [{**alone, "seed": 0}, {**alone, "seed": 1}],
        [{}, {}],
        [{"dataset": 40}, {"dataset": 40}],
    ):
        assert shm.run(learn_shares, settings, options, size=2) == ["", ""]
