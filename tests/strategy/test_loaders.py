"""Loaders: what each rank of each layout reads, and what stays as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from tagi_ddp.strategy import EnsembleLayout, GroupLayout
from tagi_ddp.strategy.loaders import process_dataloader, sample_group

GROUPS, ENSEMBLE = GroupLayout(12, 2, 1, 0), EnsembleLayout(12, 2, 1, 0, 4)
LAYOUTS = {"groups": (GROUPS, 6), "ensemble": (ENSEMBLE, 3), "alone": (GroupLayout(4, 4, 2, 0), 1)}


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.length:
            raise IndexError
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def on_all_ranks(loader: DataLoader[Any], layout: GroupLayout) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    loaders = [
        process_dataloader(loader, replace(layout, rank=r)) for r in range(layout.world_size)
    ]
    return [[torch.as_tensor(batch).reshape(-1).tolist() for batch in own] for own in loaders]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batches", ["size", "sampler", "none"])
def test_samples_are_shared(kind: str, shuffle: bool, batches: str) -> None:
    layout, groups = LAYOUTS[kind]
    data = Numbers(24)
    if batches == "sampler":
        sampler = RandomSampler(data) if shuffle else SequentialSampler(data)
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
    else:
        loader = DataLoader(data, 2 if batches == "size" else None, shuffle)
    read = on_all_ranks(loader, layout)
    by_group: dict[int, list[int]] = {}
    for rank, own in enumerate(read):
        number, count = sample_group(replace(layout, rank=rank))
        assert count == groups
        assert {len(batch) for batch in own} == {1 if batches == "none" else 2}
        samples = flat(own)
        assert by_group.setdefault(number, samples) == samples
    assert sorted(flat(by_group.values())) == list(range(24))
    in_order = {number: list(range(number, 24, groups)) for number in range(groups)}
    assert (by_group == in_order) != shuffle


@pytest.mark.parametrize(("drop_last", "per_rank"), [(False, 3), (True, 2)])
def test_what_is_left_over(drop_last: bool, per_rank: int) -> None:
    loader = DataLoader(Numbers(15), drop_last=drop_last)
    read = [flat(own) for own in on_all_ranks(loader, GROUPS)]
    assert {len(own) for own in read} == {per_rank}
    assert len(set(flat(read))) == (12 if drop_last else 15)


def test_shuffles_by_epoch() -> None:
    loader = process_dataloader(DataLoader(Numbers(24), 2, shuffle=True), GROUPS)
    epochs = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        epochs.append(torch.cat(list(loader)).tolist())
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


class Named(DataLoader):
    """A loader that cannot be made again of its attributes."""

    def __init__(self, name: str) -> None:
        self.name = name.upper()
        super().__init__(Numbers(12), 3, num_workers=1, persistent_workers=True, timeout=20)


def test_a_loader_like_it() -> None:
    loader = Named("a")
    loader.worker_init_fn = print
    iterator = loader._iterator = object()
    other = process_dataloader(loader, GROUPS)
    assert isinstance(other.sampler, DistributedSampler)
    assert isinstance(loader.sampler, SequentialSampler)
    assert other.batch_sampler.sampler is other.sampler
    assert (other._iterator, loader._iterator) == (None, iterator)
    same = {"sampler", "batch_sampler", "_iterator"}
    assert vars(other).keys() == vars(loader).keys()
    assert all(vars(other)[k] is v for k, v in vars(loader).items() if k not in same)
    with pytest.raises(ValueError, match="sampler attribute should not be set"):
        other.sampler = SequentialSampler(Numbers(12))


class OwnBatches(BatchSampler):
    pass


OWN_DATA = Numbers(12)
OWN = {
    "weighted": {"sampler": WeightedRandomSampler([1.0] * 12, 12)},
    "distributed": {"sampler": DistributedSampler(OWN_DATA, 2, 0)},
    "with replacement": {"sampler": RandomSampler(OWN_DATA, replacement=True)},
    "a part": {"sampler": RandomSampler(OWN_DATA, num_samples=3)},
    "batches": {"batch_sampler": OwnBatches(SequentialSampler(OWN_DATA), 2, False)},
    "a list": {"batch_sampler": [[1, 2], [3]]},
    "no batches": {"batch_size": None, "sampler": [1, 2]},
}


@pytest.mark.parametrize("kind", OWN)
def test_a_sampler_of_ones_own_stays(kind: str) -> None:
    loader = DataLoader(OWN_DATA, **OWN[kind])
    for layout in (GROUPS, ENSEMBLE):
        assert process_dataloader(loader, layout) is loader


def test_a_sampler_is_given_once() -> None:
    loader = process_dataloader(DataLoader(OWN_DATA), GROUPS)
    assert process_dataloader(loader, GROUPS) is loader


class Told:
    """A dataset that shares by itself."""

    def set_comm_group_info(self, *info: int) -> None:
        self.info = info


class ToldNumbers(Told, Numbers):
    pass


class ToldStream(Told, Stream):
    pass


@pytest.mark.parametrize("data", [ToldNumbers(12), ToldStream()])
@pytest.mark.parametrize(
    ("layout", "info"),
    [
        (GroupLayout(24, 6, 3, 17), (17, 2, 5, 4, 2, 3)),
        (EnsembleLayout(24, 6, 2, 15, 12), (15, 2, 3, 4, 1, 3, 2, 1, 2)),
    ],
)
def test_a_dataset_is_told_the_groups(data: Any, layout: GroupLayout, info: tuple[int]) -> None:
    loader = DataLoader(data)
    assert process_dataloader(loader, layout) is loader
    assert data.info == info


def test_streams_warn() -> None:
    loader = DataLoader(Stream())
    with pytest.warns(RuntimeWarning, match="every rank reads all of Stream, unless"):
        assert process_dataloader(loader, GROUPS) is loader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert process_dataloader(loader, LAYOUTS["alone"][0]) is loader  # as it should be


def test_what_is_no_loader_stays() -> None:
    batches = [[1, 2], [3, 4]]
    assert process_dataloader(batches, GROUPS) is batches  # type: ignore[arg-type]
