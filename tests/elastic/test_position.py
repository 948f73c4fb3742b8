"""Ranks of an elastic job that stand at different places of their script."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from support.rank_pool import RankPool

from tagi_ddp.communicators.equality import RanksDiffer
from tagi_ddp.elastic.position import Position

PLAN = [["length", "30"]]


def compared(comm: Any, places: list[dict[str, Any]], steps_made: int) -> dict[str, Any]:
    stayed = [place.get("stayed", True) for place in places]
    own = {name: value for name, value in places[comm.rank].items() if name != "stayed"}
    comes_back = not stayed[comm.rank] and bool(own)
    position = Position(**own)
    position.compare(comm, sum(stayed), comes_back, steps_made)
    return asdict(position)


@pytest.mark.parametrize(
    ("places", "calls", "aligned"),
    [
        # Two have made the fifth step. The second waits in a save, and the first has completed it.
        ([{"calls": 4, "steps": 4}, {"calls": 3, "steps": 4}], 4, [True, True]),
        # The first is in the step after it, which it has not made.
        ([{"calls": 4, "steps": 5}, {"calls": 3, "steps": 4}], 4, [False, False]),
        # Neither has made its step: it comes again.
        ([{"steps": 5}, {"steps": 5}], 0, [False, False]),
        # A rank joins, and is nowhere yet.
        ([{"steps": 4, "calls": 2}, {"stayed": False}], 2, [True, True]),
        # A rank comes back, whose last step and the save behind it the other has made without it.
        ([{"steps": 4, "calls": 2}, {"steps": 4, "calls": 1, "stayed": False}], 2, [True, False]),
        # The first waits in resume(), and the second has begun.
        ([{"calls": 1}, {"calls": 2, "steps": 0}], 2, [False, False]),
        ([{"calls": 1}, {"calls": 1}], 1, [True, True]),
    ],
)
def test_the_places_of_two_ranks(
    shm: RankPool, places: list[dict[str, Any]], calls: int, aligned: list[bool]
) -> None:
    found = shm.run(compared, places, 5, size=2)
    assert [each["aligned"] for each in found] == aligned
    assert {each["calls"] for each in found} == {calls}


def test_a_rank_that_joins_learns_the_plan_of_the_others(shm: RankPool) -> None:
    places = [{"plan": PLAN, "steps": 4}, {"stayed": False}]
    for found in shm.run(compared, places, 5, size=2):
        position = Position(plan=[(name, value) for name, value in found["plan"]])
        position.follow([("length", "30")])
        text = r"first at length of this rank: 24; another rank has length: 30\. Give all ranks"
        with pytest.raises(RanksDiffer, match=text):
            position.follow([("length", "24")])
