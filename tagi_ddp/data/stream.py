"""Loaders of streams, torch's IterableDatasets, whose batches are shared among the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tagi_ddp.checks import integer
from tagi_ddp.data.digest import digest_of
from tagi_ddp.data.empty_batch import empty_batch
from tagi_ddp.data.sampler import DistributedSampler, note_drawn, share_of
from tagi_ddp.trace import script_step

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_SAMPLES = 16  # of the first batch, which all ranks compare


class PreparedStream:
    """The share of a rank of each batch of a stream; made by `prepare`.

    Each rank reads the whole stream and keeps its share, so the batches are those of one process,
    no rank waits for another, and samples of any type are allowed. A stream that is slow to read
    costs as much on each rank as in one process. It must give all ranks the same samples: it must
    not share them out itself, or shuffle by a seed of the rank.
    """

    def __init__(
        self, loader: DataLoader[Any], options: Mapping[str, Any], rank: int, ranks: int, seed: int
    ) -> None:
        from torch.utils.data import DataLoader

        assert loader.batch_size is not None
        self.num_replicas = ranks
        self._size, self._seed, self._epoch = loader.batch_size, seed, 0
        self._dataset = loader.dataset
        self._digest = ""  # of the first batch
        self._loader = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=_CollateShare(loader.collate_fn, rank, ranks),
            worker_init_fn=loader.worker_init_fn,
            **options,
        )

    @property
    def sampler(self) -> DistributedSampler:
        """Raise TypeError: a stream has no order that a sampler draws."""
        raise TypeError("a stream has no sampler: call Checkpoints.after_step after each step")

    @property
    def description(self) -> list[tuple[str, str]]:
        """The names and values that all ranks have alike if they read the same stream."""
        named = [("global_batch_size", self._size), ("seed", self._seed)]
        return [(name, str(value)) for name, value in named] + [("data", self._digest)]

    def __len__(self) -> int:
        """Return the number of batches of an epoch; raise TypeError if the stream has no length."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch next, the same on all ranks; the stream's own ``set_epoch`` gets it.

        Persistent workers have copies of the stream, which do not get it.
        """
        self._epoch = integer("epoch", epoch, 0)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's shares of the batches of an epoch."""
        import torch

        # All ranks' workers get the same seeds, which are not drawn from the user's generator.
        self._loader.generator = torch.Generator(torch.get_default_device())
        drawn = np.random.SeedSequence([self._seed, self._epoch]).generate_state(1, np.uint64)
        self._loader.generator.manual_seed(int(drawn[0]) >> 1)
        self._digest = ""
        for digest, batch in self._loader:
            self._digest = self._digest or digest
            note_drawn(weakref.ref(self))
            yield batch

    def steps(self, epochs: int, first: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) for all batches of ``epochs`` epochs.

        Steps are numbered from 0 over all epochs. A run that has made ``first`` steps goes on with
        step ``first``; the stream is read up to there.
        """
        step, first = 0, integer("first", first, 0)
        for epoch in range(integer("epochs", epochs, 0)):
            self.set_epoch(epoch)
            for batch in self:
                if step >= first:
                    script_step.number = step
                    yield step, batch
                step += 1


class _CollateShare:
    """A ``collate_fn`` that makes a batch of a rank's share of the samples.

    It returns a hash of the samples with each worker's first batch, and "" with the others.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, ranks: int) -> None:
        self._collate = collate
        self._rank, self._ranks = rank, ranks
        self._first = True

    def __call__(self, samples: list[Any]) -> tuple[str, Any]:
        digest = digest_of(samples[:_SAMPLES]) if self._first else ""
        self._first = False
        share = samples[share_of(len(samples), self._rank, self._ranks)]
        return digest, self._collate(share) if share else self._none(samples)

    def _none(self, samples: list[Any]) -> Any:
        try:
            return empty_batch(self._collate, samples[0])
        except TypeError as error:
            raise TypeError(
                f"a batch of {len(samples)} samples for {self._ranks} ranks leaves a rank without "
                f"one, and a batch of no samples cannot be made: {error}. Give the loader "
                "drop_last=True, or a collate_fn that returns arrays in mappings or sequences"
            ) from error
