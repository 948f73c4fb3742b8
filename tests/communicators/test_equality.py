"""Values that differ, or an error of one rank, raise on all ranks, and none waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.rank_pool import RankPool

from tagi_ddp.communicators.equality import RanksDiffer, all_or_none, require_equal
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
    told = f"rank {culprits[0]}: KeyError: 'no module'"
    for rank, found in enumerate(shm.run(raise_while_describing, culprits, size=3)):
        own = ("KeyError", "'no module'") if rank in culprits else ("RanksDiffer", told)
        assert found == own


KINDS: dict[str, type[Exception]] = {
    "TypeError": TypeError,
    "IndexError": IndexError,
    "RanksDiffer": KeyError,
}


def fail(comm: Any, kind: str, error: type[Exception] | None) -> tuple[list[str], str]:
    """Return the kinds and the text of the error that this rank raises if rank 1 fails."""
    try:
        with all_or_none(comm, "the models", "Build one.", error) as same:
            same("layers", 3)
            if comm.rank == 1:
                raise KINDS[kind]("no module")
    except Exception as raised:
        comm.barrier()
        return [each.__name__ for each in type(raised).__mro__], str(raised)
    return [], ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_raise_an_error_of_the_same_kind(shm: RankPool, kind: str) -> None:
    own = KINDS[kind]
    for rank, (kinds, text) in enumerate(shm.run(fail, kind, None, size=3)):
        assert own.__name__ in kinds if rank == 1 else {"RanksDiffer", kind} <= set(kinds)
        assert text.endswith("no module" if kind != "RanksDiffer" else "'no module'")
    for rank, (kinds, _) in enumerate(shm.run(fail, kind, FileNotFoundError, size=3)):
        assert kinds[0] == (own.__name__ if rank == 1 else "FileNotFoundError")


def test_ranks_may_gather_by_a_function() -> None:
    with (
        pytest.raises(RanksDiffer, match="differ first at a of rank 1: 2; rank 0 has a: 1"),
        all_or_none(lambda own: gathered_with_another(own), "the models", "Build one.") as same,
    ):
        same("a", 1)


def gathered_with_another(own: Any) -> list[Any]:
    """Return the values of two ranks, of which the second one has another entry."""
    return [own, "another" if isinstance(own, str) else [None, [["a", "2"]]]]


def test_a_world_of_one_compares_nothing() -> None:
    require_equal(SingleCommunicator(), lambda: PAIRS, "the models", "")
