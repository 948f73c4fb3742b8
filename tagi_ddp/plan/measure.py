"""Links, measured by a communicator's own all_reduces."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.init import adopted
from tagi_ddp.communicators.objects import all_gather_object
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.plan.model import Cluster, Link, all_reduce

_SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)
_REPEATS = 7  # of each size, after one that is not counted
# A step between two sums goes through parameters, deltas and states, and leaves caches to them.
_BETWEEN = 4  # times as much memory
_TRIES = 3  # on a machine that other processes keep busy


def measure_link(communicator: Communicator | Any, sizes: Sequence[int] = _SIZES) -> Link:
    """Time all_reduces of some sizes, and return the link that explains them best, to all ranks.

    In turn with other work, as in training. A collective call. Each rank must have a link of its
    own, as the ranks of one node have (`Cluster.node`), or one rank of every node while the others
    rest (`Cluster.across`).

    Args:
        communicator: of 2 or more ranks; or another library's group of them, as `as_communicator`
            takes it.
        sizes: in bytes, two different ones or more: a small one, for the latency, and for the
            bandwidth greater ones, up to what will be sent; a cache can be faster than memory.

    A busy machine can make few bytes take longer than many. Then all is measured again, up to three
    times, and of each size the least time counts. If more bytes still do not take longer, rank 0
    warns, and the link has the greatest latency and the least bandwidth that the times allow.

    Raises:
        ValueError: about an argument.
    """
    with adopted(communicator) as comm:
        return _measure(comm, sizes)


def _measure(communicator: Communicator, sizes: Sequence[int]) -> Link:
    if communicator.size < 2:
        raise ValueError("communicator has one rank: there is nothing to measure")
    counts = [integer("sizes", size, 4) // 4 for size in sizes]
    if len(set(counts)) < 2:
        raise ValueError(f"sizes must be two different ones or more, got {list(sizes)}")
    one_host = topology_of(communicator).one_host
    shares = np.array([_shares(communicator.size, one_host, 4 * count) for count in counts]).T
    seconds = np.full(len(counts), math.inf)
    for _ in range(_TRIES):
        medians = all_gather_object(communicator, [_seconds(communicator, n) for n in counts])
        # Of the slowest rank. Other processes make no sum faster.
        seconds = np.minimum(seconds, np.max(medians, axis=0))
        link = _explain(seconds, *shares)
        if link is not None:
            return link
    latencies, sent = shares
    link = Link(float((seconds / latencies).min()), float((sent / seconds).max()))
    if communicator.rank == 0:
        warnings.warn(
            f"all_reduces of {list(sizes)} bytes took {[f'{time:.3g}' for time in seconds]} s in "
            f"the best of {_TRIES} tries, which does not tell the link: its latency is at most "
            f"{link.latency:.3g} s, its bandwidth at least {link.bandwidth:.3g} bytes/s. Give "
            "greater sizes, or measure while nothing else runs",
            RuntimeWarning,
            stacklevel=3,
        )
    return link


def _explain(seconds: NDArray[Any], latencies: NDArray[Any], sent: NDArray[Any]) -> Link | None:
    """Return the link of all_reduces that took so long, each so many latencies and bytes sent.

    None if more bytes did not take longer.
    """
    # The smallest tells the latency. TCP's beginning, which is slow, is a part of the bandwidth.
    least, most = np.argmin(sent), np.argmax(sent)
    per_byte = (seconds[most] - seconds[least]) / (sent[most] - sent[least])
    latency = max(0.0, (seconds[least] - sent[least] * per_byte) / latencies[least])
    # Errors relative to the times: else the greatest size would decide alone.
    column, rest = sent / seconds, np.maximum(0.0, seconds - latency * latencies)
    per_byte = column @ (rest / seconds) / (column @ column)
    greater = sent > min(sent)
    if not rest.all() and greater.sum() > 1:  # the smallest took what the others do not
        columns = np.stack([latencies / seconds, column], 1)[greater]
        latency, per_byte = np.linalg.lstsq(columns, np.ones(len(columns)))[0]
        latency = max(0.0, latency)
    return Link(float(latency), 1 / float(per_byte)) if per_byte > 0 else None


def _shares(ranks: int, one_host: bool, size: int) -> list[float]:
    """Return how many latencies, and how many bytes, an all_reduce takes by the model."""
    units = Link(1.0, math.inf), Link(0.0, 1.0)
    in_node = ranks if one_host else 1
    return [all_reduce(Cluster(unit, unit, in_node), ranks, size) for unit in units]


def _seconds(communicator: Communicator, count: int) -> float:
    """Return the median time of an all_reduce of ``count`` floats, in turn with other work."""
    buffer = _buffer(communicator, count)
    others = [buffer + 0 for _ in range(_BETWEEN)]
    communicator.all_reduce(buffer)
    times = []
    for _ in range(_REPEATS):
        for other in others:
            other += 1
        begin = perf_counter()
        communicator.all_reduce(buffer)
        times.append(perf_counter() - begin)
    return float(np.median(times))


def _buffer(communicator: Communicator, count: int) -> Any:
    if communicator.device != "cpu":
        import torch

        return torch.zeros(count, dtype=torch.float32, device=communicator.device)
    return communicator.empty(count)  # where all_reduce is the fastest
