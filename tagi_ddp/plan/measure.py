"""The measurement of links by a communicator's own all_reduces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Communicator, all_gather_object
from tagi_ddp.communicators.init import adopted
from tagi_ddp.plan.model import Link

_SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)
_REPEATS = 7  # The calls of each size that are timed, after one that is not.
# Between two sums a step uses parameters, deltas and states, which fill the caches.
_BETWEEN = 4  # The buffers that are used between two sums.


def measure_link(communicator: Communicator | Any, sizes: Sequence[int] = _SIZES) -> Link:
    """Time all_reduces of some sizes, and return the link that they measure, on all ranks.

    A collective call, in which all_reduces alternate with other work, as in training. Each rank
    must have a link of its own, as the ranks of one node have (`Cluster.node`), or one rank of
    every node while the others are idle (`Cluster.across`). Predictions interpolate the times.
    Latency and bandwidth, from the least and the greatest size, scale them to other numbers of
    ranks.

    Args:
        communicator: of 2 or more ranks; or a group of theirs that `as_communicator` takes.
        sizes: in bytes, two different ones or more: a small one, for the latency, and greater ones,
            up to those that training sends, because a cache can be faster than memory.

    Raises:
        ValueError: naming the argument.
    """
    with adopted(communicator) as comm:
        ranks = comm.size
        if ranks < 2:
            raise ValueError("communicator has one rank: there is nothing to measure")
        counts = sorted({integer("sizes", size, 4) // 4 for size in sizes})
        if len(counts) < 2:
            raise ValueError(f"sizes must be two different ones or more, got {list(sizes)}")
        medians = [*(_seconds(comm, n) for n in counts), _vote_seconds(comm)]
        everyone = all_gather_object(comm, medians)
    *seconds, vote = np.max(everyone, axis=0)  # The slowest rank's.
    seconds = np.maximum.accumulate(seconds).tolist()
    sums = tuple((4 * count, time) for count, time in zip(counts, seconds, strict=True))
    steps, sent = math.ceil(math.log2(ranks)), 8 * (ranks - 1) / ranks * (counts[-1] - counts[0])
    longer = seconds[-1] - seconds[0]
    bandwidth = sent / longer if longer > 0 else math.inf
    return Link(seconds[0] / (2 * steps), bandwidth, sums, ranks, float(vote))


def _seconds(communicator: Communicator, count: int) -> float:
    """Return the median time of an all_reduce of ``count`` floats, in turn with other work."""
    buffer = _buffer(communicator, count)
    others = [buffer + 0 for _ in range(_BETWEEN)]
    return _median(lambda: communicator.all_reduce(buffer), others)


def _vote_seconds(communicator: Communicator) -> float:
    """Return the median time of an all_gather of 8 bytes."""
    own, everyone = _buffer(communicator, 2), _buffer(communicator, 2 * communicator.size)
    return _median(lambda: communicator.all_gather(own, everyone))


def _median(operation: Callable[[], object], others: Sequence[Any] = ()) -> float:
    """Return the median time of an operation, in turn with work on the buffers ``others``."""
    operation()
    times = []
    for _ in range(_REPEATS):
        for other in others:
            other += 1
        begin = perf_counter()
        operation()
        times.append(perf_counter() - begin)
    return float(np.median(times))


def _buffer(communicator: Communicator, count: int) -> Any:
    if communicator.device != "cpu":
        import torch

        return torch.zeros(count, dtype=torch.float32, device=communicator.device)
    return communicator.empty(count)  # all_reduce is the fastest in this memory.
