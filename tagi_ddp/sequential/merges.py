"""The merges of posteriors that a script asks for, and the counters of irregular updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tagi_ddp.checks import integer
from tagi_ddp.elastic.job import ElasticJob
from tagi_ddp.replica import Replica
from tagi_ddp.update.merging import Merging, ScheduledMerging
from tagi_ddp.update.ranks import Ranks

M = TypeVar("M", bound=Merging)


class Merges:
    """The methods of `DDPSequential` for merges; in an elastic job ``elastic`` makes them."""

    def __init__(self, ranks: Ranks, replica: Replica, elastic: ElasticJob | None) -> None:
        self._ranks = ranks
        self._replica = replica
        self._elastic = elastic

    def merge(self) -> None:
        """Merge the posteriors of all ranks now."""
        with self._ranks.or_abort():
            self._together(self._merging("merge", Merging).merge)

    def local_batches(self, share: Any, size: int) -> Iterator[Any]:
        """Yield the parts of this rank's share of a batch, each for a step of its own."""
        with self._ranks.or_abort():
            merging = self._merging("local_batches", Merging)
            size = integer("size", size, 1)
        with merging.local_steps():
            for first in range(0, len(share), size):
                yield share[first : first + size]
        with self._ranks.or_abort():
            self._together(merging.end_share)

    def begin_epoch(self, batches: int) -> None:
        """Begin an epoch of the schedule."""
        with self._ranks.or_abort():
            self._merging("begin_epoch", ScheduledMerging).begin_epoch(batches)

    def end_epoch(self, loss: float) -> float:
        """Merge the remaining steps; return the ranks' mean loss."""
        with self._ranks.or_abort():
            return self._merging("end_epoch", ScheduledMerging).end_epoch(loss)

    def partial_counts(self) -> dict[str, int]:
        """Return how many parameters of each layer have taken only a part of a merge so far."""
        return self._by_layer(self._merging("get_partial_merge_counter", Merging).guarded)

    def agreement(self) -> dict[str, float]:
        """Return by layer how much alike ranks, or nodes, had learned before the last merge."""
        found: dict[str, list[float]] = {}
        numbers = self._merging("get_merge_agreement", Merging).agreement
        for layer, number in zip(self._replica.layers, numbers, strict=True):
            found.setdefault(layer.handle.get_layer_info(), []).append(number)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def negative_variances(self) -> dict[str, int]:
        """Return by layer how many variances the last step found not positive."""
        return self._by_layer(self._replica.parameters.negative_variances)

    def _together(self, call: Callable[[], object]) -> None:
        if self._elastic is None:
            call()
        else:
            self._elastic.together(call)

    def _merging(self, method: str, kind: type[M]) -> M:
        if isinstance(self._ranks.exchange, kind):
            return self._ranks.exchange
        needs = 'reduction="precision"' + ", sync_every=SyncSchedule(...)" * (kind is not Merging)
        raise RuntimeError(f"{method}() needs DDPSequential(..., {needs})")

    def _by_layer(self, numbers: Iterable[int]) -> dict[str, int]:
        """Return the sums of numbers by the engine's description of the layer."""
        counts: dict[str, int] = {}
        for layer, number in zip(self._replica.layers, numbers, strict=True):
            name = layer.handle.get_layer_info()
            counts[name] = counts.get(name, 0) + number
        return counts
