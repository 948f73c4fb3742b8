"""The measurement of a row: ours and the others in turn, in the same processes and the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tagi_ddp import Communicator


@dataclass(frozen=True)
class Contender:
    """One way to do the work: by all ranks together or, if ``alone``, by rank 0."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None  # before each sample, outside of its time
    calls: int = 1  # of `run`, back to back, in each sample
    alone: bool = False


@dataclass(frozen=True)
class Figure:
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def single(cls, value: float) -> Figure:
        """Return that of one measurement."""
        return cls(value, value, value)

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Return that of so many measurements."""
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        return cls(float(middle), float(low), float(high))

    def in_unit(self, factor: float) -> Figure:
        return Figure(factor * self.median, factor * self.low, factor * self.high)

    def rate(self, amount: float) -> Figure:
        """Turn the time that ``amount`` takes into the amount per time."""
        return Figure(amount / self.median, amount / self.high, amount / self.low)


@dataclass(frozen=True)
class Missing:
    """Stands where a figure would, or what it takes to measure it, and says why there is none."""

    reason: str


@dataclass(frozen=True)
class Row:
    """One comparison; ``ratio`` and ``target`` say how many times better ours is."""

    name: str
    ours: Figure | Missing
    other: Figure | Missing
    unit: str
    target: float | None  # None: the row is for information

    @property
    def ratio(self) -> float | None:
        if isinstance(self.ours, Missing) or isinstance(self.other, Missing):
            return None
        if self.unit.endswith("/s"):  # a throughput: more is better
            return self.ours.median / self.other.median
        return self.other.median / self.ours.median


def measure(
    communicator: Communicator,
    contenders: Sequence[Contender],
    rounds: int,
    warm_up: bool = True,
) -> dict[str, Figure]:
    """Return the seconds that one call takes, by the contender's name; the same on all ranks.

    Each round takes one sample of each contender, in a random order, so that whatever else the
    machine does, and however regularly, meets all of them; with ``warm_up``, a round before them
    does not count. A rank's time begins when all ranks are ready and ends when its own call
    returns; that of a sample is the longest of all ranks'.
    """
    own = np.empty((warm_up + rounds, len(contenders)))
    order = np.random.default_rng(0)  # the same on all ranks
    for samples in own:
        for place in order.permutation(len(contenders)):
            samples[place] = _sample(communicator, contenders[place])
    everyone = np.empty((communicator.size, *own.shape))
    communicator.all_gather(own, everyone)
    low, median, high = np.quantile(everyone.max(axis=0)[-rounds:], (0.25, 0.5, 0.75), axis=0)
    return {
        contender.name: Figure(float(median[i]), float(low[i]), float(high[i]))
        for i, contender in enumerate(contenders)
    }


def _sample(communicator: Communicator, contender: Contender) -> float:
    takes_part = communicator.rank == 0 or not contender.alone
    if takes_part:
        contender.prepare()
    # Who waits long at a barrier falls asleep; the second one finds every rank awake.
    communicator.barrier()
    communicator.barrier()
    start = time.perf_counter()
    if takes_part:
        for _ in range(contender.calls):
            contender.run()
    seconds = time.perf_counter() - start
    communicator.barrier()
    return seconds / contender.calls
