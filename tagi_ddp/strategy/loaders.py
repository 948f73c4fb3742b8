"""Loaders of shares: the ranks of a sample group read the same samples, other groups others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tagi_ddp.strategy.layout import EnsembleLayout, GroupLayout


def sample_group(layout: GroupLayout | EnsembleLayout) -> tuple[int, int]:
    """Return the number of this rank's sample group, and the number of sample groups.

    The ranks that share a loss read the same samples: model groups, or ensemble groups.
    """
    if isinstance(layout, EnsembleLayout):
        return layout.ensemble_group, layout.ensemble_groups
    return layout.model_group, layout.model_groups


def process_dataloader(
    loader: DataLoader[Any], layout: GroupLayout | EnsembleLayout
) -> DataLoader[Any]:
    """Return a loader of the samples of ``loader`` that this rank is to read.

    - A dataset with the method ``set_comm_group_info`` gets the groups by it, and shares its
      samples itself: the loader stays.
    - A loader without a sampler of the user's is copied, with a DistributedSampler that shares the
      samples among the sample groups. Both shuffle or not, and drop the last samples or not; if
      not, some samples are read twice, because groups get equally many.
    - A sampler or batch sampler of the user's stays: this rank reads what it yields.
    - An IterableDataset without that method stays, with a RuntimeWarning: all groups read all of
      it, unless it shares its samples itself.
    """
    dataset = getattr(loader, "dataset", None)
    set_info = getattr(dataset, "set_comm_group_info", None)
    if set_info is not None:
        set_info(*_group_info(layout))
        return loader
    if not isinstance(loader, DataLoader):  # Lightning takes any iterable.
        return loader
    number, groups = sample_group(layout)
    if isinstance(dataset, IterableDataset):
        if groups > 1:
            warnings.warn(
                f"every rank reads all of {type(dataset).__name__}, unless it shares its samples "
                "among ranks by itself: give it a method set_comm_group_info that takes the "
                "groups, or use a dataset with indices",
                RuntimeWarning,
                stacklevel=2,
            )
        return loader
    if not _is_default(loader):
        return loader
    sampler: DistributedSampler[Any] = DistributedSampler(
        cast(Dataset[Any], dataset),
        num_replicas=groups,
        rank=number,
        shuffle=shuffles(loader),
        drop_last=bool(getattr(loader.batch_sampler, "drop_last", False)),
    )
    return _with_sampler(loader, sampler)


def _group_info(layout: GroupLayout | EnsembleLayout) -> tuple[int, ...]:
    """Return the positional arguments of ``set_comm_group_info``."""
    ensemble: tuple[int, ...] = ()
    if isinstance(layout, EnsembleLayout):
        ensemble = (layout.ensemble_group, layout.ensemble_rank, layout.ensemble_groups)
    return (
        layout.rank,
        layout.model_group,
        layout.model_rank,
        layout.model_groups,
        *ensemble,
        layout.reader_rank,
        layout.read_group_size,
    )


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that yields single indices, or None."""
    if loader.batch_sampler is None:  # The loader has batch_size=None.
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", None)


def shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether the loader draws the order of its samples."""
    return isinstance(_sampler(loader), RandomSampler)


def _is_default(loader: DataLoader[Any]) -> bool:
    """Return whether the loader reads each sample once, as it does without a sampler."""
    sampler = _sampler(loader)
    return (
        type(loader.batch_sampler) in (BatchSampler, type(None))
        and type(sampler) in (RandomSampler, SequentialSampler)
        and not getattr(sampler, "replacement", False)
        and len(sampler) == len(cast(Sized, loader.dataset))
    )


def _with_sampler(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> DataLoader[Any]:
    """Return a copy of a loader, of the same class, that reads the samples of ``sampler``."""
    batches: Any = loader.batch_sampler
    if batches is not None:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    other = copy.copy(loader)
    # A DataLoader refuses new samplers because its iterator may be running; the copy has none.
    vars(other).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return other
