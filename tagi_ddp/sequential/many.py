"""Many small networks, each a training of its own, shared out over ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, PeerLost, all_gather_object, init
from tagi_ddp.communicators.equality import Entry, require_equal
from tagi_ddp.communicators.guard import or_abort
from tagi_ddp.communicators.init import adopted
from tagi_ddp.launcher.meeting import launcher_connection
from tagi_ddp.sequential.journal import Journals, Outcomes, journals
from tagi_ddp.sequential.results import from_text, to_text

T = TypeVar("T")

# A week. Ranks may be ready hours apart, and one that is lost is noticed whatever the limit.
_PATIENCE = 7 * 24 * 3600.0


class MapError(RuntimeError):
    """Some of the items of `map_networks` failed; the others have results.

    errors: by the item's index, the traceback of what was raised. results: all items', in order;
    None where there is none.
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

    Each call is a training of its own, like that of one series of hundreds: build a network, wrap
    it by `accelerate`, train it, return what is wanted of it. Before the call of item i the engine
    and numpy's legacy generator are seeded by ``seed + i``, so that its result does not depend on
    who computes it, nor on what was computed before. Small networks fill one core: use as many
    ranks as cores.

    Args:
        train: gets an item; returns None, a bool, a number, a text, bytes, or lists, tuples and
            dicts of these. Arrays become lists, numpy's scalars Python's. An item that returns
            anything else, like a date, has failed, and one that calls ``sys.exit``, too.
        items: the same on all ranks.
        weights: about how long each item takes, in any unit, so that ranks end together; by
            default all as long.
        seed: from which the items' seeds count.
        communicator: whose ranks take part, or a group as `as_communicator` takes it; by default
            the launcher's ranks, and one alone without.
        progress: called with the number of own items that are done, and of all own items.

    Returns:
        the results in the order of the items, on all ranks. Who is ready waits for the others, a
        week at most, but over your ``communicator`` its ``timeout`` at most, after which all
        results are lost: make that longer than any two ranks can be apart.

    One call at a time in a process: the generators are those of all its threads.

    Raises:
        MapError: on all ranks, at the end, where items failed; it has the other results. If a rank
            dies, the others of its host have its results until then, and its other items have
            failed. ``tagi-ddp run`` and `launch` let them go on to their ends if all ranks are on
            one host; other launchers may end them at once.
        ValueError: on all ranks, before the first item: ``weights`` has another length than
            ``items``, ranks have different arguments, or a rank has refused one. That rank's own
            may be a TypeError.
    """
    everything: list[T]
    loads: list[float]

    def described() -> list[Entry]:
        nonlocal everything, loads, seed
        everything = list(items)
        loads = [1.0] * len(everything) if weights is None else [float(w) for w in weights]
        if len(loads) != len(everything):
            raise ValueError(f"weights has {len(loads)} numbers for {len(everything)} items")
        seed = integer("seed", seed, 0)
        named = {"the number of items": len(everything), "weights": loads, "seed": seed}
        return [(name, str(value)) for name, value in named.items()]

    with init() if communicator is None else adopted(communicator) as group:
        if communicator is None:
            group.timeout = _PATIENCE
        remedy = "Give the same items, weights and seed on all ranks."
        require_equal(group, described, "arguments of map_networks", remedy)
        shares = _shares(loads, group.size)
        launcher, lost = launcher_connection(), None
        if launcher is not None:
            launcher.outlive(True)
        with journals(group) as kept:
            with or_abort([group]):  # of an interrupt, or an error of ``progress``
                own = _outcomes(train, everything, shares[group.rank], seed, progress, kept)
            try:
                outcomes = all_gather_object(group, [list(part.items()) for part in own])
            except PeerLost as error:
                lost = error  # from here on the launcher waits for this process's end
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
    """Return what this rank has made of its share of the items, and write it down as it comes."""
    results: dict[int, str] = {}
    errors: dict[int, str] = {}
    for count, index in enumerate(share, start=1):
        kept.write("begin", index)
        try:
            text = to_text(_seeded(train, items[index], seed + index))
            from_text(text)  # what cannot be read must not be found at the end
        except KeyboardInterrupt:
            raise
        except BaseException:  # also sys.exit(), which must end neither script nor others
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
    """Return each rank's items: the heaviest first, always to who has least."""
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
