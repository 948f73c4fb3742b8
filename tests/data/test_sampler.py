"""The sampler's promises for any length and number of ranks."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from tagi_ddp.data import DistributedSampler
from tagi_ddp.data.sampler import last_drawn

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


ROWS: dict[str, Callable[[], Any]] = {
    "floats": lambda: np.arange(24.0).reshape(12, 2),
    "numbers": lambda: np.arange(12),
    "texts": lambda: np.array(["a", "b", "c"] * 4),
    "bfloat16": lambda: torch.arange(12).bfloat16(),
    "complex with gradients": lambda: torch.randn(12, 2, dtype=torch.cfloat, requires_grad=True),
    "a TensorDataset": lambda: TensorDataset(torch.arange(12), torch.arange(12.0)),
}
WITHOUT = {
    "a length": lambda: 12,
    "a list": lambda: [0] * 12,
    "a Series": lambda: Series(),
    "objects": lambda: np.array([object()] * 12),
    "a sparse tensor": lambda: torch.eye(12).to_sparse(),
}


class Series:
    """Rows by labels, as pandas has them."""

    dtype, shape = np.dtype(float), (12,)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, label: int) -> float:
        raise KeyError(label)


@pytest.mark.parametrize("kind", [*ROWS, *WITHOUT])
def test_rows_that_all_ranks_compare(kind: str) -> None:
    """The hash is that of equal rows, in any memory, and of others in another order."""
    torch.manual_seed(0)
    rows = {**ROWS, **WITHOUT}[kind]()
    digest = dict(DistributedSampler(rows, 2, 0).description)["data"]
    if kind in WITHOUT:
        assert digest == ""
        return
    assert digest == dict(DistributedSampler(copy.deepcopy(rows), 2, 1).description)["data"]
    order = [*range(1, 12), 0]
    other = rows[order] if not hasattr(rows, "tensors") else TensorDataset(*rows[order])
    assert digest != dict(DistributedSampler(other, 2, 0).description)["data"]


def test_each_thread_has_its_last_sampler() -> None:
    own = DistributedSampler(8, 1, 0)
    own.batches(4)
    found: list[Any] = []

    def draw() -> None:
        found.append(last_drawn())
        DistributedSampler(8, 1, 0).batches(2)

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join(30)
    assert found == [None]
    assert last_drawn() is own
