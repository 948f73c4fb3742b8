"""Trackers of runs, like MLflow and W&B: what training calls, on rank 0 alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol


class Tracker(Protocol):
    """An object that a user passes to training, which calls it on rank 0; see examples/trackers.py.

    An error of a method ends the training with that error, on all ranks.
    """

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        """Begin a run of this name and these settings."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of an epoch, which ended after so many steps or epochs."""
        ...

    def finish(self, failed: bool) -> None:
        """End the run; ``failed`` if an error or a signal ends the training."""
        ...


class Tracking:
    """The trackers of one run; only those of rank 0 are called."""

    def __init__(self, trackers: Sequence[Tracker], rank: int) -> None:
        self._trackers = trackers if rank == 0 else ()

    @contextmanager
    def run(self, name: str, settings: Mapping[str, Any]) -> Iterator[None]:
        """Start the trackers before the block, and finish those that have started after it."""
        failed = True

        def finish(tracker: Tracker) -> None:
            tracker.finish(failed)

        with ExitStack() as started:
            for tracker in self._trackers:
                tracker.start(name, settings)
                started.callback(partial(finish, tracker))
            yield
            failed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of an epoch with each tracker."""
        for tracker in self._trackers:
            tracker.log(metrics, step)


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Raise TypeError if one lacks a method."""
    for tracker in trackers:
        for method in ("start", "log", "finish"):
            if not callable(getattr(tracker, method, None)):
                raise TypeError(
                    f"trackers must have the methods start, log and finish, but "
                    f"{type(tracker).__name__} has no {method}"
                )
