"""Loaders of torch whose batches are shared among the ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tagi_ddp.checks import integer
from tagi_ddp.data.empty_batch import empty_batch
from tagi_ddp.data.sampler import DistributedSampler
from tagi_ddp.data.stream import PreparedStream
from tagi_ddp.trace import script_step

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# The arguments of a DataLoader that do not concern batches; its attributes have the same names.
_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def prepare(
    loader: DataLoader[Any],
    *,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> PreparedLoader | PreparedStream:
    """Return a loader of this rank's share of each of ``loader``'s batches.

    ``batch_size`` becomes that of all ranks together. Workers, pinned memory, ``collate_fn``,
    ``drop_last`` and whether samples are shuffled stay. The ranks' shares make the same batches at
    any number of ranks.

    Iteration draws nothing from the generators of this process. Before each batch, a worker seeds
    the global generators of Python, numpy and torch, and a fork's copy of ``loader.generator``,
    from ``seed``, the step and the rank. A run that resumes at a step therefore draws the same as
    the run that was not stopped. Other generators of a data set start anew in the workers.

    Args:
        loader: of a data set with a length and indices, with a batch size, shuffled or not; or of
            an IterableDataset, which each rank reads as a whole (see `PreparedStream`).
        num_replicas, rank: the launcher's by default.
        seed: of the order, and of all that workers draw; the same on all ranks.

    Raises:
        TypeError, ValueError: naming what cannot be shared. TypeError also if a rank's share of a
            batch is empty and a batch of no samples cannot be made, see `PreparedLoader`; with
            workers at the first batch.
    """
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

    if not isinstance(loader, DataLoader):
        raise TypeError(f"loader must be a torch DataLoader, got {type(loader).__name__}")
    if loader.batch_size is None:
        raise ValueError("loader has no batch_size: give it one, instead of a batch_sampler")
    options = {name: getattr(loader, name) for name in _OPTIONS}
    if isinstance(loader.dataset, IterableDataset):
        shares_of = DistributedSampler(0, num_replicas, rank)
        return PreparedStream(loader, options, shares_of.rank, shares_of.num_replicas, seed)
    drawn = loader.sampler
    if not isinstance(drawn, RandomSampler | SequentialSampler) or getattr(
        drawn, "replacement", False
    ):
        raise ValueError(
            f"loader draws by a {type(drawn).__name__}; shares are for shuffle=True or False"
        )
    length: Any = loader.dataset
    if len(drawn) != len(length):
        raise ValueError(
            f"loader's {type(drawn).__name__} draws {len(drawn)} samples of a data set of "
            f"{len(length)}: shares are of whole data sets; give the loader a "
            "torch.utils.data.Subset of the samples to draw, and no num_samples"
        )
    shuffle = isinstance(drawn, RandomSampler)
    sampler = DistributedSampler(length, num_replicas, rank, shuffle, seed)
    shares = _Shares(sampler, loader.batch_size, loader.drop_last, loader.num_workers > 0)
    collate = _Collate(loader.collate_fn, loader.dataset, shares.empty())
    if not loader.num_workers:
        collate.check()
    options["worker_init_fn"] = _Start(loader.worker_init_fn, loader.generator)
    return PreparedLoader(
        DataLoader(loader.dataset, batch_sampler=shares, collate_fn=collate, **options), shares
    )


class PreparedLoader:
    """The share of a rank; made by `prepare`. Iteration gives one epoch, ``sampler.epoch``.

    A rank whose share of a small last batch is empty gets a batch of no samples, and must step with
    it like the others. Its arrays and tensors have no rows, and its sequences of samples no
    elements, in mappings, dataclasses, lists, tuples and named tuples. Numbers, texts, tensors
    without dimensions and other objects have no such value: `prepare` refuses them if a share is
    empty.
    """

    def __init__(self, loader: DataLoader[Any], shares: _Shares) -> None:
        self._loader = loader
        self._shares = shares

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler that draws the order, for `tagi_ddp.checkpoint.Checkpoints`."""
        return self._shares.sampler

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._shares.per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's shares of the batches of an epoch."""
        first = self.sampler.epoch * len(self)
        for _, batch in self._steps(first, first + len(self)):
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; call it with the same number on all ranks."""
        self.sampler.set_epoch(epoch)

    def steps(self, epochs: int, first: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) for all batches of ``epochs`` epochs.

        Steps are numbered from 0 over all epochs. A run that has made ``first`` steps goes on with
        step ``first``, without loading earlier samples: `Checkpoints.resume` returns the number.
        """
        last = integer("epochs", epochs, 0) * len(self)
        return self._steps(integer("first", first, 0), last)

    def _steps(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        import torch

        self._shares.steps = range(first, last)
        # A DataLoader draws a seed when it is iterated, which must not change the user's generator.
        self._loader.generator = torch.Generator(torch.get_default_device())
        self._loader.generator.manual_seed(_long_seed(self._shares.seeds(first)))
        for step, batch in zip(range(first, last), self._loader, strict=True):
            if self.sampler.after_step is not None and step > first:
                self.sampler.after_step(step)
            script_step.number = step
            yield step, batch


class _Shares:
    """The indices of this rank's share of each batch of ``steps``."""

    def __init__(
        self, sampler: DistributedSampler, batch_size: int, drop_last: bool, workers: bool
    ) -> None:
        self.sampler = sampler
        self._workers = workers
        self._size = batch_size
        self._length = sampler.settings["length"]
        whole, remainder = divmod(self._length, batch_size)
        self.per_epoch = whole + (remainder > 0 and not drop_last)
        self.steps = range(self.per_epoch)

    def __len__(self) -> int:
        return len(self.steps)

    def empty(self) -> str:
        """Return a description of a batch that has fewer samples than ranks; "" if none has."""
        ranks, size, remainder = self.sampler.num_replicas, self._size, self._length % self._size
        last = remainder if self.per_epoch > self._length // size else min(size, self._length)
        if not self.per_epoch or min(last, size) >= ranks:
            return ""
        return f"a batch of {last} of {self._length} samples for {ranks} ranks"

    def __iter__(self) -> Iterator[list[int]]:
        self.sampler.begin(self._size)
        for step, share in self.sampler.shares(self._size, self.per_epoch, self.steps):
            indices = share.tolist()
            yield _Batch(indices, self.seeds(step)) if self._workers else indices

    def seeds(self, step: int) -> list[int]:
        """Return ten random numbers of 32 bits, which no other step or rank has."""
        of_step = np.random.SeedSequence(self.sampler.seed, spawn_key=(step, self.sampler.rank))
        return [int(seed) for seed in of_step.generate_state(10)]


class _Batch(list[int]):
    """The indices of a batch, and the numbers that seed the worker that draws it.

    A worker loads the pickle of a batch directly before it draws the samples. The seeds are loaded
    with it, so the data set needs no wrapper that counts steps.
    """

    def __init__(self, indices: list[int], seeds: list[int]) -> None:
        super().__init__(indices)
        self._seeds = seeds

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_worker, (list(self), self._seeds)


_generators: list[Any] = []  # The generators of a worker, beside the global ones.


def _in_worker(indices: list[int], seeds: list[int]) -> list[int]:
    """Seed the generators of this worker; return the indices."""
    import torch

    random.seed(_long_seed(seeds))
    torch.manual_seed(_long_seed(seeds[2:]))
    for generator in _generators:
        generator.manual_seed(_long_seed(seeds[4:]))
    np.random.seed(seeds[6:])
    return indices


def _long_seed(seeds: Sequence[int]) -> int:
    """Return a seed of 63 bits, the most that a DataLoader's generator takes."""
    return (seeds[0] << 32 | seeds[1]) >> 1


class _Start:
    """A ``worker_init_fn`` that calls the loader's, and keeps its generator for `_Batch`.

    A worker that is not forked has no copy of the generator: torch cannot send one.
    """

    def __init__(self, start: Callable[[int], None] | None, generator: Any) -> None:
        self._start = start
        self._generator = generator

    def __reduce__(self) -> tuple[Any, ...]:
        return _Start, (self._start, None)

    def __call__(self, worker: int) -> None:
        if self._generator is not None:
            _generators.append(self._generator)
        if self._start is not None:
            self._start(worker)


class _Collate:
    """A ``collate_fn`` that calls the loader's, and makes a batch of no samples if there are none.

    ``empty`` describes a batch of which a rank gets no samples. All ranks then check at the first
    batch, on each worker, that a batch of no samples can be made.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, empty: str) -> None:
        self._collate = collate
        self._dataset = dataset
        self._unchecked = empty

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples) if samples else self._none()
        self.check()
        return batch

    def check(self) -> None:
        """Raise TypeError, once, if a share is empty and no batch can be made for it."""
        if self._unchecked:
            self._none()
            self._unchecked = ""

    def _none(self) -> Any:
        try:
            with _same_numbers():
                return empty_batch(self._collate, self._dataset[0])
        except TypeError as error:
            raise TypeError(
                f"{self._unchecked} leaves a rank without a sample, and a batch of no samples "
                f"cannot be made: {error}. Give the loader drop_last=True, a batch_size whose last "
                "batch has a sample for each rank, or a collate_fn that returns mappings, "
                "dataclasses or sequences of arrays whose lengths are multiples of the number of "
                "samples"
            ) from error


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch's CPU after the block."""
    import torch

    python, own = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(own)
