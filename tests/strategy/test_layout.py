"""The layouts: tables by hand, and what holds for all numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.strategy import EnsembleLayout, GroupLayout

# By W, M and R: for each rank its model group, place there, reader group, place there, and root.
TABLES = {
    (1, 1, 1): ["0 0 0 0 0"],
    (2, 1, 1): ["0 0 0 0 0", "1 0 0 0 1"],
    (2, 2, 1): ["0 0 0 0 0", "0 1 1 0 1"],
    (2, 2, 2): ["0 0 0 0 0", "0 1 0 1 0"],
    (4, 2, 1): ["0 0 0 0 0", "0 1 1 0 1", "1 0 0 0 2", "1 1 1 0 3"],
    (4, 4, 2): ["0 0 0 0 0", "0 1 0 1 0", "0 2 1 0 2", "0 3 1 1 2"],
    (8, 4, 2): [
        *("0 0 0 0 0", "0 1 0 1 0", "0 2 1 0 2", "0 3 1 1 2"),
        *("1 0 0 0 4", "1 1 0 1 4", "1 2 1 0 6", "1 3 1 1 6"),
    ],
    (12, 6, 3): [
        *("0 0 0 0 0", "0 1 0 1 0", "0 2 0 2 0", "0 3 1 0 3", "0 4 1 1 3", "0 5 1 2 3"),
        *("1 0 0 0 6", "1 1 0 1 6", "1 2 0 2 6", "1 3 1 0 9", "1 4 1 1 9", "1 5 1 2 9"),
    ],
}
# By W, M and E: for each rank its ensemble, place there, member, and the ranks of its sub-group.
ENSEMBLES = {
    (1, 1, 1): ["0 0 0 [0]"],
    (2, 1, 2): ["0 0 0 [0, 1]", "0 1 1 [0, 1]"],
    (4, 2, 4): ["0 0 0 [0, 2]", "0 1 0 [1, 3]", "0 2 1 [0, 2]", "0 3 1 [1, 3]"],
    (8, 2, 4): [
        *("0 0 0 [0, 2]", "0 1 0 [1, 3]", "0 2 1 [0, 2]", "0 3 1 [1, 3]"),
        *("1 0 0 [4, 6]", "1 1 0 [5, 7]", "1 2 1 [4, 6]", "1 3 1 [5, 7]"),
    ],
    (12, 2, 6): [
        *("0 0 0 [0, 2, 4]", "0 1 0 [1, 3, 5]", "0 2 1 [0, 2, 4]"),
        *("0 3 1 [1, 3, 5]", "0 4 2 [0, 2, 4]", "0 5 2 [1, 3, 5]"),
        *("1 0 0 [6, 8, 10]", "1 1 0 [7, 9, 11]", "1 2 1 [6, 8, 10]"),
        *("1 3 1 [7, 9, 11]", "1 4 2 [6, 8, 10]", "1 5 2 [7, 9, 11]"),
    ],
}


@pytest.mark.parametrize("numbers", TABLES)
def test_groups_by_hand(numbers: tuple[int, int, int]) -> None:
    layouts = [GroupLayout(*numbers, rank) for rank in range(numbers[0])]
    assert TABLES[numbers] == [
        f"{a.model_group} {a.model_rank} {a.reader_group} {a.reader_rank} {a.reader_root}"
        for a in layouts
    ]
    assert {layout.model_groups for layout in layouts} == {numbers[0] // numbers[1]}


@pytest.mark.parametrize("numbers", ENSEMBLES)
def test_ensembles_by_hand(numbers: tuple[int, int, int]) -> None:
    world, model, ensemble = numbers
    layouts = [EnsembleLayout(world, model, 1, rank, ensemble) for rank in range(world)]
    assert ENSEMBLES[numbers] == [
        f"{a.ensemble_group} {a.ensemble_rank} {a.member} {list(a.subgroup_ranks)}" for a in layouts
    ]
    assert {a.ensemble_groups for a in layouts} == {world // ensemble}
    assert {a.members for a in layouts} == {ensemble // model}


@given(*[st.integers(1, 6)] * 4)
def test_groups_are_blocks_that_cover_all_ranks(r: int, m: int, e: int, w: int) -> None:
    model, ensemble = r * m, r * m * e
    world = ensemble * w
    layouts = [EnsembleLayout(world, model, r, rank, ensemble) for rank in range(world)]
    for name, size in (("model", model), ("reader", r), ("ensemble", ensemble)):
        blocks = [getattr(layout, f"{name}_ranks") for layout in layouts]
        assert all(rank in block and len(block) == size for rank, block in enumerate(blocks))
        assert sorted(rank for block in set(blocks) for rank in block) == list(range(world))
    for rank, layout in enumerate(layouts):
        assert layout.model_ranks.index(rank) == layout.model_rank
        assert layout.ensemble_ranks.index(rank) == layout.ensemble_rank
        assert layout.reader_ranks.index(rank) == layout.reader_rank
        assert layout.reader_root == layout.reader_ranks[0]
        assert set(layout.reader_ranks) <= set(layout.model_ranks) <= set(layout.ensemble_ranks)
        others = [layouts[other] for other in layout.subgroup_ranks]
        assert layout.subgroup_ranks.index(rank) == layout.member
        assert {other.model_rank for other in others} == {layout.model_rank}
        assert [other.member for other in others] == list(range(e))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((8, 3, 1, 4), ("num_gpus_per_model is 3", "world_size, 8")),
        ((8, 4, 3, 8), ("read_group_size is 3", "num_gpus_per_model, 4")),
        ((8, 2, 4, 8), ("read_group_size is 4", "num_gpus_per_model, 2")),
        ((12, 2, 1, 8), ("num_gpus_per_ensemble is 8", "world_size, 12")),
        ((12, 4, 1, 6), ("num_gpus_per_model is 4", "num_gpus_per_ensemble, 6")),
        ((4, 4, 1, 2), ("num_gpus_per_model is 4", "num_gpus_per_ensemble, 2")),
        ((4, 8, 1, 4), ("num_gpus_per_model is 8", "world_size, 4")),
        ((4, 0, 1, 4), ("num_gpus_per_model", "0")),
        ((4, 2, -1, 4), ("read_group_size", "-1")),
        ((4, 2, 1, 0), ("num_gpus_per_ensemble", "0")),
        ((0, 1, 1, 1), ("world_size", "0")),
    ],
)
def test_wrong_numbers(numbers: tuple[int, int, int, int], words: tuple[str, ...]) -> None:
    world, model, reader, ensemble = numbers
    texts = set()
    for rank in range(max(1, world)):
        with pytest.raises(ValueError, match=words[0]) as error:
            EnsembleLayout(world, model, reader, rank, ensemble)
        texts.add(str(error.value))
    (text,) = texts  # the same on every rank
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("rank", "error"), [(4, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_wrong_rank(rank: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="rank"):
        GroupLayout(4, 2, 1, rank)  # type: ignore[arg-type]
