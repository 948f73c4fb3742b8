"""The search for the scheme that trains to the same quality in the least time.

It assumes that all candidates need equally many steps. With merge="agreement" the negative
log-likelihood after 8 epochs of Fashion-MNIST, by an MLP, was at most 3 % above that of one process
with the same global batch of 256 or 1,024, at up to 16 ranks, 32 steps between two merges and, with
4 ranks, 8 bits. The search therefore tries no more than 32 steps. The assumption does not hold for
all networks and batches (docs/merging.md); only a sum does what one process does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tagi_ddp.plan.model import Cluster, Training, memory, predict

STEPS = (1, 2, 4, 8, 16, 32)  # The steps between two merges.
BITS = (32, 16, 8)
CLOSE = 1.05  # The factor on the least time up to which a more cautious choice is better.


@dataclass(frozen=True)
class Choice:
    """A scheme with its settings, and the mean seconds of its steps.

    ``sync_every``: steps between two merges; for the scheme "asynchronous" the longest skip between
    nodes. ``bits``: the bits of a number that is sent.
    """

    scheme: str
    sync_every: int
    bits: int
    seconds: float

    def memory(self, training: Training, cluster: Cluster, ranks: int) -> float:
        """Return the bytes that a rank holds, without activations."""
        return memory(replace(training, bits=self.bits), cluster, ranks, self.scheme)

    def __str__(self) -> str:
        """Return for example "precision, every 8, int8"."""
        if self.scheme == "sum":
            return self.scheme
        name = {32: "", 16: ", bf16", 8: ", int8"}[self.bits]
        return f"{self.scheme}, every {self.sync_every}{name}"


@dataclass(frozen=True)
class Budget:
    """The work of training, and its limits.

    shares: the number of shares of batches: the samples of all epochs, divided by those that a rank
    learns in a step. seconds: the time for all. memory: the bytes of a rank, see `Choice.memory`.
    """

    shares: float
    seconds: float
    memory: float = math.inf


def fewest_ranks(
    training: Training, cluster: Cluster, budget: Budget, most: int = 10_000
) -> tuple[int, Choice] | None:
    """Return the least number of ranks that keep within a budget, and the choice, or None.

    R ranks make 1 / R of the steps of one. Candidates are parts of a node, then whole nodes. The
    search doubles the number until one does, and bisects below it: more ranks are not slower.
    """
    node = cluster.ranks_per_node
    numbers = [*range(1, min(node, most + 1)), *range(node, most + 1, node)]
    end = len(numbers) - 1
    last = -1
    for index in sorted({min((1 << power) - 1, end) for power in range(end.bit_length() + 1)}):
        if found := _within(training, cluster, budget, numbers[index]):
            break
        last = index
    else:
        return None
    while index - last > 1:
        middle = (last + index) // 2
        if choice := _within(training, cluster, budget, numbers[middle]):
            index, found = middle, choice
        else:
            last = middle
    return numbers[index], found


def _within(training: Training, cluster: Cluster, budget: Budget, ranks: int) -> Choice | None:
    """Return the most cautious choice by which so many ranks keep within a budget."""
    limit = budget.seconds * ranks / budget.shares
    for choice in _candidates(training, cluster, ranks):
        if choice.seconds <= limit and choice.memory(training, cluster, ranks) <= budget.memory:
            return choice
    return None


def search(training: Training, cluster: Cluster, ranks: int) -> Choice:
    """Return the most cautious choice that takes at most 5 % more than the least time.

    The most cautious first: sums, merges, asynchronous merges; few steps between two; more bits.
    """
    found = list(_candidates(training, cluster, ranks))
    least = min(choice.seconds for choice in found)
    return next(choice for choice in found if choice.seconds <= CLOSE * least)


def _candidates(training: Training, cluster: Cluster, ranks: int) -> Iterator[Choice]:
    yield Choice("sum", 1, 32, predict(training, cluster, ranks)["sum"])
    for scheme in ("precision", "asynchronous"):
        for steps in STEPS:
            for bits in BITS:
                tried = replace(training, sync_every=steps, max_global_skips=steps, bits=bits)
                yield Choice(scheme, steps, bits, predict(tried, cluster, ranks)[scheme])
