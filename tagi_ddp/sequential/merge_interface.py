"""DDPSequential's methods for replicas that step alone and merge their posteriors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from tagi_ddp._backend import Agreement
from tagi_ddp.update.exchange import Exchange
from tagi_ddp.update.merging import Merging, ScheduledMerging

M = TypeVar("M", bound=Merging)


class MergeInterface:
    """For ``reduction="precision"``, and the counters of what was not as it should be."""

    _exchange: Exchange
    _replica: Any
    _or_abort: Callable[[], AbstractContextManager[None]]
    _raise_if_refused: Callable[[Agreement, str], None]

    def merge(self) -> None:
        """Merge the posteriors of all ranks now; a collective call, for ``reduction="precision"``.

        With the precisions l = 1 / variance and the prior (mu0, l0) that all ranks had after the
        merge before, l = l0 + sum (l_r - l0) and mu = mu0 + sum l_r (mu_r - mu0) / l, in float64.
        No sample counts twice, however many steps lie between two merges. A parameter whose
        precision would fall below a tenth takes half of the merge, or a quarter, and so on;
        `get_partial_merge_counter` counts these.

        Raises NotFiniteError on all ranks if a step of any was refused since the merge before.
        """
        with self._or_abort():
            agreement = self._merging("merge").merge()
        self._raise_if_refused(agreement, "")

    def begin_epoch(self, batches: int) -> None:
        """Tell the schedule how many steps an epoch has, the same number on all ranks."""
        with self._or_abort():
            self._merging("begin_epoch", ScheduledMerging).begin_epoch(batches)

    def end_epoch(self, loss: float) -> float:
        """Merge what is left, and tell the schedule the mean of the ranks' losses; return it.

        A collective call. Raises ValueError on all ranks if a loss is NaN or infinite.
        """
        with self._or_abort():
            mean, agreement = self._merging("end_epoch", ScheduledMerging).end_epoch(loss)
        self._raise_if_refused(agreement, "")
        return mean

    @property
    def unmerged_steps(self) -> int:
        """The steps since the ranks were made equal; 0 where each step does that."""
        return self._exchange.steps if isinstance(self._exchange, Merging) else 0

    def get_partial_merge_counter(self) -> dict[str, int]:
        """Return how many parameters of each layer have taken only a part of a merge so far.

        By the engine's description of the layer, as `get_neg_var_w_counter` does.
        """
        return self._by_layer(self._merging("get_partial_merge_counter").guarded)

    def get_neg_var_w_counter(self) -> dict[str, int]:
        """Return how many variances of each layer's weights the last step found not positive.

        By the engine's description of the layer, as pytagi does, those inside of blocks too; layers
        with one description are added up.
        """
        return self._by_layer(self._replica.parameters.negative_variances)

    def _merging(self, method: str, kind: type[M] = Merging) -> M:
        if isinstance(self._exchange, kind):
            return self._exchange
        needs = 'reduction="precision"' + ", sync_every=SyncSchedule(...)" * (kind is not Merging)
        raise RuntimeError(f"{method}() needs DDPSequential(..., {needs})")

    def _by_layer(self, numbers: Iterable[int]) -> dict[str, int]:
        """Return numbers by the engine's description of the layer."""
        counts: dict[str, int] = {}
        for layer, number in zip(self._replica.layers, numbers, strict=True):
            name = layer.handle.get_layer_info()
            counts[name] = counts.get(name, 0) + number
        return counts
