"""The sampler's promises for any length and number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.data import DistributedSampler

LENGTHS = st.integers(0, 60)
RANKS = st.integers(1, 6)
SEEDS = st.integers(0, 2**70)


def samplers(length, ranks, **options):
    return [DistributedSampler(length, ranks, rank, **options) for rank in range(ranks)]


@given(LENGTHS, RANKS, SEEDS, st.booleans(), st.integers(1, 70), st.integers(0, 3))
def test_batches_of_all_ranks_are_those_of_one_process(length, ranks, seed, shuffle, size, epoch):
    team = samplers(length, ranks, seed=seed, shuffle=shuffle)
    (alone,) = samplers(length, 1, seed=seed, shuffle=shuffle)
    for sampler in [*team, alone]:
        sampler.set_epoch(epoch)
    expected = alone.batches(size)
    assert sorted(np.concatenate([[], *expected])) == list(range(length))
    assert all(len(batch) == size for batch in expected[:-1])
    shares = [sampler.batches(size) for sampler in team]
    assert [len(share) for share in shares] == [len(expected)] * ranks
    for *slices, batch in zip(*shares, expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(slices), batch)
        assert {part.dtype for part in slices} == {np.dtype(np.int64)}
        assert max(map(len, slices)) - min(map(len, slices)) <= 1


@given(LENGTHS, RANKS, SEEDS, st.booleans(), st.sampled_from(["keep", "pad", "drop"]))
def test_iteration_shares_the_one_process_order(length, ranks, seed, shuffle, uneven):
    team = samplers(length, ranks, seed=seed, shuffle=shuffle, uneven=uneven)
    order = list(team[0].order())
    shares = [list(sampler) for sampler in team]
    assert [len(share) for share in shares] == [len(sampler) for sampler in team]
    if uneven != "keep":
        assert len({len(share) for share in shares}) == 1
    # Dealing the shares out again in turn gives the order, cut or continued from its start.
    longest = max(len(share) for share in shares)
    dealt = [share[i] for i in range(longest) for share in shares if i < len(share)]
    target = {
        "keep": length,
        "pad": -(-length // ranks) * ranks,
        "drop": length // ranks * ranks,
    }[uneven]
    assert dealt == (order * (ranks + 1))[:target]


@given(st.integers(20, 60), RANKS, SEEDS)
def test_each_epoch_and_seed_has_its_own_order(length, ranks, seed):
    sampler = DistributedSampler(length, ranks, ranks - 1, seed=seed)
    orders = {tuple(sampler.order())}
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler.order()))
    orders.add(tuple(DistributedSampler(length, 1, 0, seed=seed + 1).order()))
    assert len(orders) == 4
    sampler.set_epoch(0)
    assert tuple(sampler.order()) in orders
    assert tuple(DistributedSampler(length, 1, 0, False, seed).order()) == tuple(range(length))


def test_the_launcher_gives_the_defaults(monkeypatch):
    data = np.zeros((10, 3))
    assert list(DistributedSampler(data, shuffle=False)) == list(range(10))
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(f"TAGI_DDP_{name}", str(value))
    assert list(DistributedSampler(data, shuffle=False)) == [1, 3, 5, 7, 9]
    assert list(DistributedSampler(data, rank=0, shuffle=False)) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dataset": -1}, ValueError, "dataset's length must be at least 0, got -1"),
        ({"dataset": 2.5}, TypeError, "dataset's length must be an integer, got 2.5"),
        ({"num_replicas": 0}, ValueError, "num_replicas must be at least 1, got 0"),
        ({"rank": 2}, ValueError, "rank must be less than num_replicas, which is 2, got 2"),
        ({"rank": -1}, ValueError, "rank must be at least 0, got -1"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"uneven": "wrap"}, ValueError, "uneven must be 'keep', 'pad' or 'drop', got 'wrap'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        DistributedSampler(**{"dataset": 4, "num_replicas": 2, "rank": 0, **arguments})
    sampler = DistributedSampler(4, 2, 0)
    with pytest.raises(ValueError, match="global_batch_size must be at least 1, got 0"):
        sampler.batches(0)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        sampler.set_epoch(-1)


@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 4), st.integers(1, 4), st.data())
def test_steps_are_numbered_over_all_epochs(
    length: int, size: int, epochs: int, ranks: int, data: st.DataObject
) -> None:
    """From any step on they are the same as from the first one on, and those of `batches`."""
    sampler = DistributedSampler(length, ranks, data.draw(st.integers(0, ranks - 1)), seed=7)
    expected = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        expected += sampler.batches(size)
    first = data.draw(st.integers(0, len(expected) + 1))
    found = list(sampler.steps(size, epochs, first))
    assert [step for step, _ in found] == list(range(first, len(expected)))
    for step, share in found:
        np.testing.assert_array_equal(share, expected[step])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, 1), "global_batch_size"), ((1, -1), "epochs"), ((1, 1, -1), "first")],
)
def test_wrong_steps(arguments: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        list(DistributedSampler(3, 1, 0).steps(*arguments))
