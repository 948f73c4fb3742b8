"""The time of a step on many ranks, from few measured numbers.

A message of n bytes takes latency + n / bandwidth (Hockney 1994, "The communication challenge for
MPP", Parallel Computing 20). Collectives are counted in such messages, as Thakur, Rabenseifner and
Gropp do (2005, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19); which messages there are is what the
communicators of this package do:

- Before any operation, but a sum between nodes, there is a handshake of all ranks: one latency in a
  node; between nodes one for each of its rounds, log4 of the ranks.
- all_reduce of n bytes over the p ranks of a node: each rank gets its slice of n / p bytes from
  every other, reduces it, and gives that to every other: two phases, each one latency, and
  (p - 1) / p * n bytes.
- Between nodes a message of data comes after one that gives leave to send it: two latencies.
- all_reduce over p nodes of one rank: a ring of 2 (p - 1) messages of
  n / p bytes, or, of few bytes, one step for each prime factor of p, in which a rank sends all of
  them to each other of a group of so many. Even fewer travel with a handshake's messages.
- all_reduce over nodes of several ranks: a phase in the node, a ring of each slice, with all of the
  node's on the link that they share, and a phase in the node; large ones in chunks, of which one
  is between nodes while others are in the nodes.
- broadcast of n bytes in a node: one latency and n bytes after the handshake.
- A vote, before replicas change, on whether all can: between nodes a handshake, whose messages
  carry it; in a node a handshake and an all_gather of almost no bytes, which is one phase.

The schemes, each with n bytes, both deltas of all parameters:

- "sum": after every step all vote, then an all_reduce over all ranks.
- "precision": that step is a merge, and there is one every ``sync_every`` steps. All vote, then
  posteriors are merged in each node (all_reduce), then between nodes: all_reduce over one rank of
  each node, which has the link for itself, and broadcast in the node. The arithmetic of a merge
  comes with either level.
  With fewer ``bits`` the changes travel by all_to_all and all_gather, which are a handshake and a
  phase each, between nodes, or in the only one.
- "asynchronous": merges as `SyncSchedule` says, walked through batch by batch. What a node sends
  travels while the next batches compute; a merge waits for the rest of it. Merges in a node, and
  all of those in warm-up and cool-down epochs and after an epoch's last batch, block. The loss is
  taken to fall in every epoch, so that skips stay the longest.

Not counted: computing that gets slower while data travels; what a rank's processor does for a
message; sums that are reduced during backward, which hide a part of this; that merges are more
frequent at first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tagi_ddp.checks import integer, real
from tagi_ddp.communicators.control.overlay import rounds
from tagi_ddp.communicators.host.flat import FEW
from tagi_ddp.communicators.host.messages import SMALL, factors
from tagi_ddp.communicators.host.two_level import number_of_chunks
from tagi_ddp.optim.schedule import Skips, Sync, SyncSchedule

_CHUNKS = 2  # of a large sum over several hosts, as gloo's

SCHEMES = ("sum", "precision", "asynchronous")
"""The schemes of exchange: sums at each step, merges, or merges by a schedule, without waiting."""


@dataclass(frozen=True)
class Link:
    """The connection of a rank, or a node, to the others, in both directions at once.

    ``latency`` is in seconds, 0 or more; ``bandwidth`` in bytes a second, in each direction,
    greater than 0 and possibly infinite. Raises TypeError or ValueError that names the argument.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        _zero_or_more("latency", self.latency)
        _positive("bandwidth", self.bandwidth)

    def seconds(self, size: float) -> float:
        """Return how long a message of ``size`` bytes takes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``ranks_per_node`` ranks each, the last one of those that are left.

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
        """Return how many nodes so many ranks fill."""
        return -(-ranks // self.ranks_per_node)


@dataclass(frozen=True)
class Training:
    """The work and the traffic of each rank, the same at any number of ranks.

    Args:
        step: seconds of a step of one rank that does not communicate; greater than 0.
        parameters: their number; greater than 0, not necessarily an integer.
        sync_every: the steps from one merge of the scheme "precision" to the next, 1 or more.
        batches, epochs: batches of an epoch, and epochs, 1 or more, of the scheme "asynchronous".
        merge: seconds of a merge's arithmetic for each byte, 0 or more.
        bytes_per_parameter: greater than 0; 8.0: the deltas of mean and variance in float32.
        warmup_epochs, cooldown_epochs, max_global_skips, local_skip_factor: of `SyncSchedule`.
        bits: 32, or 16 or 8, of each number of a change, between nodes if there are several.

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
            stability_level=0.0,  # a loss that falls is not stable
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

    Means, variances and their deltas are 8 bytes for each parameter; ``python -m benchmarks plan``
    measured how many times as much there is. Activations come on top.
    """
    nodes, inside = cluster.nodes(ranks), min(ranks, cluster.ranks_per_node)
    times = 5.0
    if scheme != "sum" and ranks > 1:
        times = 9.0 if nodes == 1 else 12.0 if inside == 1 else 13.0
        times += 5.0 * (training.bits < 32)
    return times * training.bytes


# Operations, in seconds.


def _phase(link: Link, ranks: int, size: float) -> float:
    """Return how long it takes until each of ``ranks`` has its slice of ``size`` from each other's.

    The same for giving its own slice to each other.
    """
    return link.seconds((ranks - 1) / ranks * size) if ranks > 1 else 0.0


def _message(link: Link, size: float) -> float:
    """Return how long a message between nodes takes, which waits for leave to be sent."""
    return link.latency + link.seconds(size)


def _sum_between(link: Link, nodes: int, size: float, lanes: int = 1) -> float:
    """Return how long a sum takes, of which each of some ranks of a node carries a slice."""
    if size > SMALL * nodes * lanes:
        return 2 * (nodes - 1) * _message(link, size / nodes)
    return math.fsum(_message(link, (factor - 1) * size) for factor in factors(nodes))


def _handshake(cluster: Cluster, ranks: int) -> float:
    if cluster.nodes(ranks) == 1:
        return cluster.node.latency if ranks > 1 else 0.0
    return len(rounds(0, ranks)) * cluster.across.latency


def _vote(cluster: Cluster, ranks: int) -> float:
    gather = _phase(cluster.node, ranks, 0) if cluster.nodes(ranks) == 1 else 0.0
    return _handshake(cluster, ranks) + gather


def all_reduce(cluster: Cluster, ranks: int, size: float) -> float:
    """Return how long an all_reduce of ``size`` bytes over all of ``ranks`` takes."""
    inside, nodes = min(ranks, cluster.ranks_per_node), cluster.nodes(ranks)
    if nodes == 1:
        return _handshake(cluster, ranks) + 2 * _phase(cluster.node, ranks, size)
    if size <= FEW:
        return _handshake(cluster, ranks)
    if inside == 1:
        return _sum_between(cluster.across, nodes, size)
    lanes = 1 if size <= SMALL else inside
    chunks = number_of_chunks(size, cluster.across.latency, cluster.across.bandwidth, _CHUNKS)
    within = 2 * _phase(cluster.node, inside, size / chunks)
    # Several chunks are on their way at once: they wait for the network's latency together.
    more = _sum_between(replace(cluster.across, latency=0.0), nodes, size / chunks, lanes)
    unlimited = replace(cluster.across, bandwidth=math.inf)
    latency = _sum_between(unlimited, nodes, size / chunks, lanes)
    return within + latency + more + (chunks - 1) * max(within, more)


def _sum_of_changes(cluster: Cluster, ranks: int, size: float, bits: int) -> float:
    """Return how long a sum of changes takes; in few bits by all_to_all and all_gather."""
    if bits == 32:
        return all_reduce(cluster, ranks, size)
    # A scale for 256 numbers of 8 bits, and, exact, a square for 512.
    few = size * bits / 32 + (size / 256 if bits == 8 else 0)
    if cluster.nodes(ranks) == 1:
        phase = _phase(cluster.node, ranks, few)
    else:
        phase = _message(cluster.across, (ranks - 1) / ranks * few)
    return 2 * (_handshake(cluster, ranks) + phase) + all_reduce(cluster, ranks, size / 512)


@dataclass(frozen=True)
class _Costs:
    """Seconds of what a two-level merge consists of, and of all of it at once."""

    local: float  # in the node
    transfer: float  # between nodes; may be in flight while ranks compute
    merging: float  # after the transfer
    blocking: float


def _costs(training: Training, cluster: Cluster, ranks: int) -> _Costs:
    size, nodes = training.bytes, cluster.nodes(ranks)
    inside = min(ranks, cluster.ranks_per_node)
    arithmetic = size * training.merge
    local = transfer = merging = 0.0
    if inside > 1:
        bits = training.bits if nodes == 1 else 32
        local = _sum_of_changes(cluster, inside, size, bits) + arithmetic
    if nodes > 1:
        each = replace(cluster, ranks_per_node=1)
        transfer = _sum_of_changes(each, nodes, size, training.bits)
        merging = arithmetic
        if inside > 1:  # broadcast
            merging += cluster.node.latency + cluster.node.seconds(size)
    return _Costs(local, transfer, merging, _vote(cluster, ranks) + local + transfer + merging)


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
    """Return what the epochs' batches do, and in how many epochs they do it."""
    schedule = training.schedule()
    counts: Counter[tuple[bool, Skips]] = Counter()
    syncs: dict[tuple[bool, Skips], list[Sync]] = {}
    for epoch in range(training.epochs):
        kind = (schedule.phase == "cycling", schedule.skips)
        counts[kind] += 1
        if kind not in syncs:
            batches = range(training.batches)
            syncs[kind] = [schedule.after(batch, training.batches) for batch in batches]
        schedule.end_epoch(-epoch)  # the loss
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
