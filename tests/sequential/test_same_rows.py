"""One warning where all ranks train on the same rows, whose deltas are summed."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, fresh
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential, OutputUpdater

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
