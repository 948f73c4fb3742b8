"""torch's loaders, shared out over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tagi_ddp import DistributedSampler, prepare


def dataset(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length), torch.arange(2 * length).reshape(length, 2))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
)
def test_shares_are_those_of_the_sampler(
    length: int, size: int, ranks: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    plain = DataLoader(dataset(length), size, shuffle, drop_last=drop_last)
    for rank in range(ranks):
        loader = prepare(plain, num_replicas=ranks, rank=rank, seed=3)
        sampler = DistributedSampler(length, ranks, rank, shuffle, 3)
        for one in (loader, sampler):
            one.set_epoch(epoch)
        expected = sampler.batches(size)
        if drop_last and length % size:
            expected = expected[:-1]
        assert len(loader) == len(plain) == len(expected)
        for (numbers, rows), share in zip(loader, expected, strict=True):
            assert numbers.tolist() == share.tolist()
            assert rows.shape == (len(share), 2)
        assert loader.sampler.settings == sampler.settings


@pytest.mark.parametrize("first", [0, 5, 7, 12, 99])
def test_steps_go_on_where_they_were(first: int) -> None:
    def steps(begin: int) -> list[tuple[int, list[int]]]:
        loader = prepare(DataLoader(dataset(13), 4, shuffle=True), num_replicas=2, rank=1)
        return [(step, numbers.tolist()) for step, (numbers, _) in loader.steps(3, begin)]

    assert steps(first) == steps(0)[first:]
    assert len(steps(0)) == 12


def test_only_what_is_drawn_is_read() -> None:
    class Counting(Dataset[int]):
        reads: list[int] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            self.reads.append(index)
            return index

    loader = prepare(DataLoader(Counting(), 10), num_replicas=2, rank=0)
    steps = loader.steps(2, 15)
    assert next(steps)[1].tolist() == [50, 51, 52, 53, 54]
    assert Counting.reads == [50, 51, 52, 53, 54]


def named(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([x for x, _ in samples]), "more": (np.ones(len(samples)), ["text"])}


def test_options_stay_and_workers_work() -> None:
    plain = DataLoader(dataset(9), 4, num_workers=2, collate_fn=named, persistent_workers=True)
    loader = prepare(plain, num_replicas=3, rank=2)
    for _ in range(2):
        batches = list(loader)
        assert [batch["x"].tolist() for batch in batches] == [[3], [7], []]
        assert [len(batch["more"][0]) for batch in batches] == [1, 1, 0]


@pytest.mark.parametrize(
    ("loader", "error", "text"),
    [
        ([1, 2], TypeError, "loader must be a torch DataLoader, got list"),
        (DataLoader(dataset(4), batch_size=None), ValueError, "no batch_size"),
        (
            DataLoader(dataset(4), 2, sampler=WeightedRandomSampler([1.0] * 4, 4)),
            ValueError,
            "draws by a WeightedRandomSampler",
        ),
        (
            DataLoader(dataset(9), 2, sampler=RandomSampler(dataset(9), num_samples=4)),
            ValueError,
            "RandomSampler draws 4 samples of a data set of 9",
        ),
        (
            DataLoader(dataset(9), 2, sampler=SequentialSampler(range(12))),
            ValueError,
            "SequentialSampler draws 12 samples of a data set of 9",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_named(loader: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        prepare(loader)
