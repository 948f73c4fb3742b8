"""Ranks that say different things all hear of the first, and none waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.rank_pool import RankPool

from tagi_ddp.communicators.equality import RanksDiffer, require_equal
from tagi_ddp.communicators.single import SingleCommunicator

PAIRS = [("layer 0", "Linear"), ("layer 1", "ReLU"), ("bias", "True")]


def compare(comm: Any, others: list[tuple[str, str]], culprit: int) -> str:
    """Return the error's text."""
    text = ""
    try:
        said = others if comm.rank == culprit else PAIRS
        require_equal(comm, lambda: said, "the models", "Build one.")
    except RanksDiffer as error:
        text = str(error)
    comm.barrier()  # it goes on working
    return text


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (PAIRS, ""),
        ([PAIRS[0], ("layer 1", "Tanh")], "layer 1 of rank {0}: Tanh; rank 0 has layer 1: ReLU"),
        (PAIRS[::-1], "bias of rank {0}: True; rank 0 has layer 0: Linear"),
        (PAIRS[:2], "bias of rank 0, which rank {0} lacks"),
        ([*PAIRS, ("more", "")], "more of rank {0}, which rank 0 lacks"),
    ],
)
@pytest.mark.parametrize("culprit", [1, 2])
def test_the_first_difference_is_named_on_all_ranks(
    shm: RankPool, others: list[tuple[str, str]], text: str, culprit: int
) -> None:
    whole = text and f"the models differ first at {text.format(culprit)}. Build one."
    assert shm.run(compare, others, culprit, size=3) == [whole] * 3


def raise_while_describing(comm: Any, culprits: list[int]) -> tuple[str, str]:
    def described() -> list[tuple[str, str]]:
        if comm.rank in culprits:
            raise KeyError("no module")
        return PAIRS

    start = time.monotonic()
    try:
        require_equal(comm, described, "the models", "Build one.")
    except (KeyError, RanksDiffer) as error:
        assert time.monotonic() - start < 5  # not the timeout
        comm.barrier()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("culprits", [[1], [0, 2], [0, 1, 2]])
def test_what_one_rank_refuses_ends_all(shm: RankPool, culprits: list[int]) -> None:
    told = f"the models are refused by rank {culprits[0]}: KeyError: 'no module'. Build one."
    for rank, found in enumerate(shm.run(raise_while_describing, culprits, size=3)):
        own = ("KeyError", "'no module'") if rank in culprits else ("RanksDiffer", told)
        assert found == own


def test_a_world_of_one_compares_nothing() -> None:
    require_equal(SingleCommunicator(), lambda: PAIRS, "the models", "")
