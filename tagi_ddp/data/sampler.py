"""The samples that each rank takes of a dataset."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.data.digest import digest_of
from tagi_ddp.environment import rank_and_size
from tagi_ddp.trace import script_step

_ROWS = 16  # rows of the data that all ranks compare

_thread = threading.local()


class Drawn(Protocol):
    """A source of the ranks' samples: a sampler, or a stream."""

    num_replicas: int

    @property
    def description(self) -> list[tuple[str, str]]:
        """The names and values that all ranks have alike if they share out the same samples."""
        ...


def last_drawn() -> Drawn | None:
    """Return the source from which this thread drew last, if it is still in use."""
    last: weakref.ref[Any] | None = getattr(_thread, "last", None)
    return None if last is None else last()


def note_drawn(source: weakref.ref[Any]) -> None:
    """Record the source from which this thread draws."""
    _thread.last = source


class DistributedSampler:
    """The indices of a dataset's samples that one rank takes, in every epoch anew.

    All ranks draw one order from ``seed`` and the epoch. They share it by either method:

    - `batches`: each global batch is cut into one slice per rank. The ranks' k-th slices,
      concatenated in rank order, are exactly the k-th batch of a single process. Each sample is
      taken once, and all ranks get equally many slices: for training in the same data order on any
      number of ranks, and for evaluation.
    - iteration: rank r takes elements r, r + num_replicas, r + 2 num_replicas, ... of the order, as
      torch's sampler does. ``uneven`` decides if ranks do not divide the number of samples.

    Args:
        dataset: anything with a length, or the length.
        num_replicas: number of ranks; by default that of torch's default group, if it is
            initialised, else the launcher's world size.
        rank: this rank; by default that in the same group.
        shuffle: draw a new order each epoch (see `set_epoch`); else 0, 1, 2, ...
        seed: the seed of the order, the same on all ranks.
        uneven: how iteration shares an uneven number of samples. "pad": the order's first samples
            are repeated at its end until all ranks take equally many, so no rank waits for others
            that have no more samples. "drop": the order's last samples are left out instead.
            "keep": each sample once, some ranks take one more: for evaluation.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Literal["keep", "pad", "drop"] = "pad",
    ) -> None:
        if num_replicas is None or rank is None:
            own, size = rank_and_size()
            num_replicas = size if num_replicas is None else num_replicas
            rank = own if rank is None else rank
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        self._length = integer("dataset's length", length, 0)
        self.num_replicas: int = integer("num_replicas", num_replicas, 1)
        self.rank: int = integer("rank", rank, 0)
        if self.rank >= self.num_replicas:
            raise ValueError(
                f"rank must be less than num_replicas, which is {self.num_replicas}, got {rank}"
            )
        if uneven not in ("keep", "pad", "drop"):
            raise ValueError(f"uneven must be 'keep', 'pad' or 'drop', got {uneven!r}")
        self.shuffle = shuffle
        self.seed: int = integer("seed", seed, 0)
        self.uneven = uneven
        self.epoch: int = 0
        self._digest = _digest_of(dataset, self._length, self.seed)
        self._size: int | None = None  # of the present global batches; None: it is iterated
        self.after_step: Callable[[int], None] | None = None
        """Called between two steps of `steps`, with the number of steps made; see `Checkpoints`."""
        self._drawn: set[int] = set()  # The sizes of this run's global batches.
        self._before: set[int] = set()  # Those of the run that was resumed.

    @property
    def settings(self) -> dict[str, int]:
        """The settings that decide the order of each epoch, by name; the same on all ranks."""
        return {"length": self._length, "shuffle": int(self.shuffle), "seed": self.seed}

    @property
    def description(self) -> list[tuple[str, str]]:
        """The names and values that all ranks have alike if they share out the same samples.

        They are the `settings`, the size of the last global batch, and a hash of sixteen rows, if
        the data is an array or a tensor.
        """
        named = [*self.settings.items(), ("global_batch_size", self._size)]
        return [(name, str(value)) for name, value in named] + [("data", self._digest)]

    @property
    def batch_sizes(self) -> list[int]:
        """The sizes of the global batches so far, of this run and of the one that it resumes."""
        return sorted(self._drawn | self._before)

    def go_on(self, batch_sizes: Sequence[int]) -> None:
        """Resume a run whose global batches had these sizes; none: any size.

        Raises ValueError if batches have been drawn already, and none had one of these sizes. If no
        batch has been drawn yet, the first one of another size raises it, because a number of steps
        counts batches of one size.
        """
        self._before = set(batch_sizes)
        if self._before and self._drawn and self._before.isdisjoint(self._drawn):
            self._refuse(max(self._drawn))

    def begin(self, global_batch_size: int) -> int:
        """Check, record and return the size of the global batches that are drawn next."""
        size = integer("global_batch_size", global_batch_size, 1)
        if self._before and not self._drawn and size not in self._before:
            self._refuse(size)
        self._drawn.add(size)
        self._size = size
        note_drawn(weakref.ref(self))
        return size

    def _refuse(self, size: int) -> None:
        sizes = " or ".join(map(str, sorted(self._before)))
        raise ValueError(
            f"global_batch_size is {size}, but the run that was resumed had {sizes}, and its steps "
            "are counted in such batches: give the same size, or train in a new folder; for "
            "evaluation give another DistributedSampler"
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; call it with the same number on all ranks."""
        self.epoch = integer("epoch", epoch, 0)

    def order(self) -> npt.NDArray[np.int64]:
        """Return the indices of all samples in the order of this epoch, int64."""
        order = np.arange(self._length, dtype=np.int64)
        if self.shuffle:
            np.random.default_rng((self.seed, self.epoch)).shuffle(order)
        return order

    def batches(self, global_batch_size: int) -> list[npt.NDArray[np.int64]]:
        """Return this rank's slice of each global batch of the epoch: int64 index arrays.

        All ranks get equally many slices. The slices of one batch differ by at most one in length;
        that of a small last batch may be empty.
        """
        size = self.begin(global_batch_size)
        order = self.order()
        return [self._slice(order[start : start + size]) for start in range(0, len(order), size)]

    def steps(
        self, global_batch_size: int, epochs: int, first: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield (step, share) for each global batch of ``epochs`` epochs, as `batches` cuts them.

        Steps are numbered from 0 over all epochs. A run that has made ``first`` steps goes on with
        step ``first``, which costs as much as drawing one order. This sets `epoch`.
        """
        size = self.begin(global_batch_size)
        per_epoch = -(-self._length // size)
        steps = range(integer("first", first, 0), integer("epochs", epochs, 0) * per_epoch)
        for step, share in self.shares(size, per_epoch, steps):
            if self.after_step is not None and step > steps.start:
                self.after_step(step)
            script_step.number = step
            yield step, share

    def shares(
        self, size: int, per_epoch: int, steps: range
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield (step, share) for these steps, of ``per_epoch`` global batches an epoch."""
        order = None
        for step in steps:
            epoch, batch = divmod(step, per_epoch)
            if order is None or batch == 0:
                self.set_epoch(epoch)
                order = self.order()
            yield step, self._slice(order[batch * size : (batch + 1) * size])

    def _slice(self, batch: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return batch[share_of(len(batch), self.rank, self.num_replicas)]

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's indices of the epoch."""
        self._size = None
        note_drawn(weakref.ref(self))
        order = self.order()
        if self.uneven != "keep":
            # This repeats the beginning of an order that is too short, and cuts a longer one.
            order = np.resize(order, len(self) * self.num_replicas)
        return iter(order[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        """Return the number of indices that iteration yields on this rank."""
        share, remainder = divmod(self._length, self.num_replicas)
        more = {"keep": self.rank < remainder, "pad": remainder > 0, "drop": False}
        return share + more[self.uneven]


def share_of(count: int, rank: int, ranks: int) -> slice:
    """Return a rank's slice of a batch of ``count`` samples; slices differ by at most one."""
    share, remainder = divmod(count, ranks)
    start = rank * share + min(rank, remainder)
    return slice(start, start + share + (rank < remainder))


def _digest_of(dataset: Any, length: int, seed: int) -> str:
    """Return a hash of some rows of an array or a tensor, or of a TensorDataset; "" of others."""
    arrays = getattr(dataset, "tensors", [dataset])
    if not length or not all(map(_has_rows, arrays)):
        return ""
    rows = np.random.default_rng(seed).integers(0, length, _ROWS)
    return digest_of(array[int(row)] for row in rows for array in arrays)


def _has_rows(array: Any) -> bool:
    """Return whether it is an array or a tensor of numbers or texts, as each rank has them."""
    if isinstance(array, np.ndarray):
        return array.ndim > 0 and not array.dtype.hasobject
    dense = str(getattr(array, "layout", "")) == "torch.strided"
    return dense and array.ndim > 0 and hasattr(array, "__dlpack__")
