"""Trainings of many small networks, shared out over ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, PeerLost, all_gather_object, init
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.communicators.guard import or_abort
from tagi_ddp.communicators.init import adopted
from tagi_ddp.elastic.connection import launcher_connection
from tagi_ddp.sequential.journal import Journals, Outcomes, journals
from tagi_ddp.sequential.results import from_text, to_text

T = TypeVar("T")

# A week. Ranks may finish hours apart, and a lost one is noticed whatever the limit.
_PATIENCE = 7 * 24 * 3600.0


class MapError(RuntimeError):
    """Some of the items of `map_networks` failed; the others have results.

    errors: the tracebacks, by the item's index. results: those of all items, in order; None for an
    item without one.
    """

    def __init__(self, message: str, errors: dict[int, str], results: list[Any]) -> None:
        super().__init__(message)
        self.errors = errors
        self.results = results

    def __reduce__(self) -> tuple[type, tuple[str, dict[int, str], list[Any]]]:
        """Pickle with all attributes."""
        return type(self), (str(self), self.errors, self.results)


def map_networks(
    train: Callable[[T], Any],
    items: Iterable[T],
    *,
    weights: Sequence[float] | npt.NDArray[Any] | None = None,
    seed: int = 0,
    communicator: Communicator | Any | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """Call ``train(item)`` for each item, on the launcher's ranks side by side; a collective call.

    Each call is an independent training, like that of one series of hundreds: build a network, wrap
    it by `accelerate`, train it, return its results. Before the call of item i the engine and
    numpy's legacy generator are seeded by ``seed + i``: its result depends neither on the rank that
    computes it nor on earlier items. Small networks fill one core: use as many ranks as cores.

    Args:
        train: gets an item; returns None, a bool, a number, a text, bytes, or lists, tuples and
            dicts of these. Arrays become lists, numpy's scalars Python's. An item fails if this
            raises, returns anything else, like a date, or calls ``sys.exit``.
        items: the same on all ranks.
        weights: the approximate time of each item, in any unit, so that ranks end together; by
            default all are equal.
        seed: the number from which the seeds of the items count.
        communicator: that of the ranks, or a group for `as_communicator`; by default the launcher's
            ranks, or this process alone without a launcher.
        progress: called with the number of own items that are done, and of all own items.

    Returns:
        the results in the order of the items, on all ranks. A rank that finishes early waits for
        the others, for a week at most. With your ``communicator`` it waits for its ``timeout``,
        after which all results are lost: make that longer than any two ranks can be apart.

    Only one call can run in a process at a time: the generators are those of all its threads.

    Raises:
        MapError: on all ranks, at the end, if items failed; it has the other results. If a rank
            dies, the others of its host have its results until then, and its other items fail.
            ``tagi-ddp run`` and `launch` let the others finish if all ranks are on one host; other
            launchers may end them at once.
        ValueError: on all ranks, before the first item: ``weights`` has another length than
            ``items``, ranks have different arguments, or a rank has refused one. That rank may
            raise a TypeError instead.
    """
    with init() if communicator is None else adopted(communicator) as group:
        if communicator is None:
            group.timeout = _PATIENCE
        remedy = "Give the same items, weights and seed on all ranks."
        with all_or_none(group, "arguments of map_networks", remedy) as same:
            everything = list(items)
            loads = [1.0] * len(everything) if weights is None else [float(w) for w in weights]
            if len(loads) != len(everything):
                raise ValueError(f"weights has {len(loads)} numbers for {len(everything)} items")
            seed = integer("seed", seed, 0)
            same("the number of items", len(everything))
            same("weights", loads)
            same("seed", seed)
        shares = _shares(loads, group.size)
        launcher, lost = launcher_connection(), None
        if launcher is not None:
            launcher.outlive(True)
        with journals(group) as kept:
            with or_abort([group]):  # An interrupt or ``progress`` may raise.
                own = _outcomes(train, everything, shares[group.rank], seed, progress, kept)
            try:
                outcomes = all_gather_object(group, [list(part.items()) for part in own])
            except PeerLost as error:
                lost = error  # From here on the launcher waits for the end of this process.
                outcomes = [
                    own if rank == group.rank else kept.read(rank, share, group.timeout)
                    for rank, share in enumerate(shares)
                ]
        if launcher is not None and lost is None:
            launcher.outlive(False)
    results: list[Any] = [None] * len(everything)
    errors: dict[int, str] = {}
    for theirs, failed in outcomes:
        for index, text in dict(theirs).items():
            results[index] = from_text(text)
        errors |= dict(failed)
    if errors:
        first = min(errors)
        raise MapError(
            f"{len(errors)} of {len(everything)} items failed: {sorted(errors)}. Item {first}:\n"
            f"{errors[first]}",
            errors,
            results,
        ) from lost
    return results


def _outcomes(
    train: Callable[[T], Any],
    items: Sequence[T],
    share: Sequence[int],
    seed: int,
    progress: Callable[[int, int], None] | None,
    kept: Journals,
) -> Outcomes:
    """Return the outcomes of this rank's share of the items, each written when it is known."""
    results: dict[int, str] = {}
    errors: dict[int, str] = {}
    for count, index in enumerate(share, start=1):
        kept.write("begin", index)
        try:
            text = to_text(_seeded(train, items[index], seed + index))
            from_text(text)  # A text that cannot be read fails here, not at the end.
        except KeyboardInterrupt:
            raise
        except BaseException:  # sys.exit(), too, must end neither the script nor others.
            errors[index] = traceback.format_exc()
            kept.write("error", index, errors[index])
        else:
            results[index] = text
            kept.write("result", index, text)
        if progress is not None:
            progress(count, len(share))
    kept.write("end")
    return results, errors


def _shares(weights: Sequence[float], ranks: int) -> list[list[int]]:
    """Return each rank's items: the heaviest first, always to the rank with the least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += weights[index]
    return shares


def _seeded(train: Callable[[T], Any], item: T, seed: int) -> Any:
    import pytagi

    pytagi.manual_seed(seed)
    np.random.seed(seed)
    return train(item)
