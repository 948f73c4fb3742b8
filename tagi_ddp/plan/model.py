"""The time of a step on many ranks, from few measured numbers.

Every exchange is modelled by all_reduces. If `measure_link` has timed some through a communicator,
their times are interpolated. If only latency and bandwidth of a link are known, n bytes on p ranks
take 2 log2(p) latencies and the time of 2 (p - 1) / p * n bytes (Rabenseifner's algorithm; Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19). The same formula scales
measured times to other numbers of ranks.

- A sum over nodes of several ranks is a sum in the node and one between nodes, which overlap except
  for the first chunk.
- A vote, on whether all ranks can change their replicas, is an all_gather of a few bytes: it takes
  what `measure_link` has timed, or log2(p) latencies.
- A broadcast takes half of a sum.
- With fewer ``bits`` a sum takes one of fewer bytes, and a vote.

The schemes, each with n bytes, both deltas of all parameters:

- "sum": after every step all ranks vote, then sum.
- "precision": after every ``sync_every`` steps there is a merge. All ranks vote. Posteriors are
  then summed in each node, then between nodes by one rank of each, which has the link for itself,
  and broadcast in the node. Each level adds the arithmetic of a merge.
- "asynchronous": merges by `SyncSchedule`, followed batch by batch. A transfer between nodes
  overlaps with the next batches; a merge waits until it is complete. Merges in a node block. In
  warm-up and cool-down epochs and after an epoch's last batch all merges block. The loss is assumed
  to fall in every epoch, which keeps the skips at the longest.

Not modelled: computing is slower during transfers; sums during backward hide a part of the time;
merges are more frequent at first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from tagi_ddp.checks import integer, real
from tagi_ddp.communicators.two_level import CHUNK
from tagi_ddp.optim.schedule import Skips, Sync, SyncSchedule

SCHEMES = ("sum", "precision", "asynchronous")
"""The schemes of exchange: sums at each step, merges, or merges by a schedule, without waiting."""


@dataclass(frozen=True)
class Link:
    """The connection of a rank, or a node, to the others, in both directions at once.

    ``latency`` is in seconds, 0 or more; ``bandwidth`` in bytes a second, in each direction,
    greater than 0 and possibly infinite. ``sums`` are pairs of bytes and seconds of all_reduces,
    measured on ``ranks`` ranks, in the order of their bytes; ``vote`` is the seconds of an
    all_gather of 8 bytes of each. Without these the link is not measured.
    Raises TypeError or ValueError that names the argument.
    """

    latency: float
    bandwidth: float
    sums: tuple[tuple[float, float], ...] = ()
    ranks: int = 2
    vote: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        _zero_or_more("latency", self.latency)
        _positive("bandwidth", self.bandwidth)
        integer("ranks", self.ranks, 2)
        for size, seconds in self.sums:
            _positive("sums", size)
            _positive("sums", seconds)
        if self.vote is not None:
            _positive("vote", self.vote)

    def all_reduce(self, ranks: int, size: float) -> float:
        """Return the seconds of an all_reduce of ``size`` bytes over ``ranks``."""
        seconds = self._formula(ranks, size)
        if not self.sums or not seconds:
            return seconds
        return self._measured(size) * seconds / self._formula(self.ranks, size)

    def all_vote(self, ranks: int) -> float:
        """Return the seconds of a vote of ``ranks``."""
        if self.vote is None:
            return _steps(ranks) * self.latency
        return self.vote * _steps(ranks) / _steps(self.ranks)

    def _formula(self, ranks: int, size: float) -> float:
        sent = (ranks - 1) / ranks * size
        return 2 * (_steps(ranks) * self.latency + sent / self.bandwidth)

    def _measured(self, size: float) -> float:
        """Interpolate between the measured sizes, both axes logarithmic.

        Fewer bytes take as long as the least; more bytes take longer in proportion.
        """
        sizes, seconds = zip(*self.sums, strict=True)
        rising = list(accumulate(seconds, max))
        if size > sizes[-1]:
            return float(rising[-1] * size / sizes[-1])
        log_seconds = np.interp(math.log(max(size, sizes[0])), np.log(sizes), np.log(rising))
        return math.exp(log_seconds)


def _steps(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``ranks_per_node`` ranks each; the last one may have fewer.

    ``node`` is each rank's link to the others of its node; ``across`` each node's link to the other
    nodes, which its ranks share.
    """

    node: Link
    across: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        """Check the number."""
        integer("ranks_per_node", self.ranks_per_node, 1)

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that have ``ranks`` ranks."""
        return -(-ranks // self.ranks_per_node)


@dataclass(frozen=True)
class Training:
    """The work and the traffic of each rank, the same at any number of ranks.

    Args:
        step: seconds of a step of one rank that does not communicate; greater than 0.
        parameters: the number of parameters; greater than 0, not necessarily an integer.
        sync_every: the steps from one merge of the scheme "precision" to the next, 1 or more.
        batches, epochs: batches of an epoch, and epochs, 1 or more, of the scheme "asynchronous".
        merge: seconds of a merge's arithmetic for each byte, 0 or more.
        bytes_per_parameter: greater than 0; 8.0: the deltas of mean and variance in float32.
        warmup_epochs, cooldown_epochs, max_global_skips, local_skip_factor: of `SyncSchedule`.
        bits: the bits of each number of a change: 32, 16 or 8; between nodes if there are several.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """

    step: float
    parameters: float
    sync_every: int = 8
    batches: int = 100
    epochs: int = 20
    merge: float = 0.0
    bytes_per_parameter: float = 8.0
    warmup_epochs: int = 4
    cooldown_epochs: int = 4
    max_global_skips: int = 8
    local_skip_factor: int = 4
    bits: int = 32

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("step", "parameters", "bytes_per_parameter"):
            if math.isinf(_positive(name, getattr(self, name))):
                raise ValueError(f"{name} must be finite, got inf")
        _zero_or_more("merge", self.merge)
        for name in ("sync_every", "batches", "epochs"):
            integer(name, getattr(self, name), 1)
        if self.bits not in (32, 16, 8):
            raise ValueError(f"bits must be 32, 16 or 8, got {self.bits!r}")
        self.schedule()

    @property
    def bytes(self) -> float:
        """The number of bytes that a rank has to send."""
        return self.parameters * self.bytes_per_parameter

    def schedule(self) -> SyncSchedule:
        """Return the schedule of the scheme "asynchronous", at its first epoch."""
        return SyncSchedule(
            self.epochs,
            warmup_epochs=self.warmup_epochs,
            cooldown_epochs=self.cooldown_epochs,
            stability_level=0.0,  # A loss that falls is not stable.
            max_global_skips=self.max_global_skips,
            local_skip_factor=self.local_skip_factor,
        )


def predict(training: Training, cluster: Cluster, ranks: int) -> dict[str, float]:
    """Return the seconds per step of each of `SCHEMES` on so many ranks, 1 or more."""
    integer("ranks", ranks, 1)
    costs = _costs(training, cluster, ranks)
    total = _vote(cluster, ranks) + all_reduce(cluster, ranks, training.bytes)
    waits = sum(count * _waits(training.step, costs, syncs) for count, syncs in _epochs(training))
    return {
        "sum": training.step + total,
        "precision": training.step + costs.blocking / training.sync_every,
        "asynchronous": training.step + waits / (training.epochs * training.batches),
    }


def memory(training: Training, cluster: Cluster, ranks: int, scheme: str) -> float:
    """Return the bytes that a rank holds for the network and its exchange by one of `SCHEMES`.

    Means and variances are 8 bytes for each parameter; ``python -m benchmarks plan`` measured how
    many times as much a rank holds. Activations come on top.
    """
    nodes, inside = cluster.nodes(ranks), min(ranks, cluster.ranks_per_node)
    times = 5.0
    if scheme != "sum" and ranks > 1:
        times = 9.0 if nodes == 1 else 12.0 if inside == 1 else 13.0
        times += 5.0 * (training.bits < 32)
    return times * training.bytes


# Operations, in seconds.


def all_reduce(cluster: Cluster, ranks: int, size: float) -> float:
    """Return the seconds of an all_reduce of ``size`` bytes over all ``ranks``."""
    inside, nodes = min(ranks, cluster.ranks_per_node), cluster.nodes(ranks)

    def levels(size: float) -> tuple[float, float]:
        return cluster.node.all_reduce(inside, size), cluster.across.all_reduce(nodes, size)

    return max(levels(size)) + min(levels(min(size, CHUNK)))


def _vote(cluster: Cluster, ranks: int) -> float:
    inside, nodes = min(ranks, cluster.ranks_per_node), cluster.nodes(ranks)
    return cluster.node.all_vote(inside) + cluster.across.all_vote(nodes)


def _sum_of_changes(link: Link, ranks: int, size: float, bits: int) -> float:
    """Return the seconds of a sum of changes."""
    if bits == 32:
        return link.all_reduce(ranks, size)
    # Each 256 numbers of 8 bits have a scale, and each 512 a square, in full precision.
    few = size * bits / 32 + (size / 256 if bits == 8 else 0)
    return link.all_vote(ranks) + link.all_reduce(ranks, few) + link.all_reduce(ranks, size / 512)


@dataclass(frozen=True)
class _Costs:
    """The seconds of the parts of a two-level merge, and of a blocking one, which has all parts."""

    local: float  # The sum in the node.
    transfer: float  # The sum between nodes, which may be in flight while ranks compute.
    merging: float  # The work after the transfer.
    blocking: float


def _costs(training: Training, cluster: Cluster, ranks: int) -> _Costs:
    size, nodes = training.bytes, cluster.nodes(ranks)
    inside = min(ranks, cluster.ranks_per_node)
    arithmetic = size * training.merge
    local = transfer = merging = 0.0
    if inside > 1:
        bits = training.bits if nodes == 1 else 32
        local = _sum_of_changes(cluster.node, inside, size, bits) + arithmetic
    if nodes > 1:
        transfer = _sum_of_changes(cluster.across, nodes, size, training.bits)
        broadcast = cluster.node.all_reduce(inside, size) / 2
        merging = arithmetic + broadcast
    vote = _vote(cluster, ranks)
    return _Costs(local, transfer, merging, vote + local + transfer + merging)


def _waits(step: float, costs: _Costs, syncs: Sequence[Sync]) -> float:
    """Return the seconds that an epoch spends on synchronizing and on waiting for it."""
    spent = spent_at_send = 0.0
    for sync in syncs:
        if sync.local:
            spent += costs.local
        if sync.merge:
            passed = sync.merge * step + spent - spent_at_send
            spent += max(0.0, costs.transfer - passed) + costs.merging
        if sync.send is not None:
            spent_at_send = spent
        if sync.blocking:
            spent += costs.blocking
    return spent


@lru_cache(maxsize=8)
def _epochs(training: Training) -> list[tuple[int, list[Sync]]]:
    """Return the kinds of epochs: the number of each, and the synchronizations of its batches."""
    schedule = training.schedule()
    counts: Counter[tuple[bool, Skips]] = Counter()
    syncs: dict[tuple[bool, Skips], list[Sync]] = {}
    for epoch in range(training.epochs):
        kind = (schedule.phase == "cycling", schedule.skips)
        counts[kind] += 1
        if kind not in syncs:
            batches = range(training.batches)
            syncs[kind] = [schedule.after(batch, training.batches) for batch in batches]
        schedule.end_epoch(-epoch)  # This loss falls in every epoch.
    return [(count, syncs[kind]) for kind, count in counts.items()]


# Checks.


def _positive(name: str, value: float) -> float:
    number = real(name, value)
    if not number > 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")
    return number


def _zero_or_more(name: str, value: float) -> None:
    if not 0 <= real(name, value) < math.inf:
        raise ValueError(f"{name} must be 0 or more, and finite, got {value}")
