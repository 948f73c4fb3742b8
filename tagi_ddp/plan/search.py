"""Which way of training takes the least time to the same quality.

What is assumed of quality: that all candidates need equally many steps. With merge="agreement" the
negative log-likelihood after 8 epochs of Fashion-MNIST, by an MLP, was at most 3 % above that of
one process with the same global batch of 256 or 1,024, at up to 16 ranks, 32 steps between two
merges and, with 4 ranks, 8 bits: so nothing beyond 32 steps is looked at. It does not hold for all
networks and batches (docs/merging.md); only a sum is what one process does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tagi_ddp.plan.model import Cluster, Training, memory, predict

STEPS = (1, 2, 4, 8, 16, 32)  # between two merges
BITS = (32, 16, 8)
CLOSE = 1.05  # how many times the least time is as good, if it comes with more caution


@dataclass(frozen=True)
class Choice:
    """A way of training, and the seconds that its step takes on average.

    ``sync_every``: steps between two merges; of the scheme "asynchronous", its longest skip between
    nodes. ``bits``: of a number on the wire.
    """

    scheme: str
    sync_every: int
    bits: int
    seconds: float

    def memory(self, training: Training, cluster: Cluster, ranks: int) -> float:
        """Return the bytes that a rank holds, but for activations."""
        return memory(replace(training, bits=self.bits), cluster, ranks, self.scheme)

    def __str__(self) -> str:
        """Return for example "precision, every 8, int8"."""
        if self.scheme == "sum":
            return self.scheme
        name = {32: "", 16: ", bf16", 8: ", int8"}[self.bits]
        return f"{self.scheme}, every {self.sync_every}{name}"


@dataclass(frozen=True)
class Budget:
    """What training may take, and how much there is to learn.

    shares: of batches, a step of one rank each: the samples of all epochs by a rank's share.
    seconds: until they are learned. memory: bytes that a rank has for what `Choice.memory` counts.
    """

    shares: float
    seconds: float
    memory: float = math.inf


def fewest_ranks(
    training: Training, cluster: Cluster, budget: Budget, most: int = 10_000
) -> tuple[int, Choice] | None:
    """Return the least number of ranks that keep within a budget, and how; None if none do.

    R ranks make 1 / R of the steps of one. Looked at are parts of a node, then whole nodes: twice
    as many each time until they do, and then between the last two, as more ranks are not slower.
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
    """Return the most cautious way in which so many ranks keep within a budget."""
    limit = budget.seconds * ranks / budget.shares
    for choice in _candidates(training, cluster, ranks):
        if choice.seconds <= limit and choice.memory(training, cluster, ranks) <= budget.memory:
            return choice
    return None


def search(training: Training, cluster: Cluster, ranks: int) -> Choice:
    """Return what takes the least time; of what takes no more than 5 % longer, the most cautious.

    The most cautious first: sums, merges, asynchronous ones; few steps between two; many bits.
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
