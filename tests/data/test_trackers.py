"""Trackers are started, told and finished once, on rank 0, whatever happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tagi_ddp.data.trackers import Tracking, check_trackers


class Noting:
    """A tracker that notes its calls, and fails in one of them."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        self._note("start", name, dict(settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._note("log", dict(metrics), step)

    def finish(self, failed: bool) -> None:
        self._note("finish", failed)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise OSError("no disk")


def train(*trackers: Noting, rank: int = 0, fails: bool = False) -> None:
    tracking = Tracking(trackers, rank)
    with tracking.run("fit", {"epochs": 2}):
        tracking.log({"loss": 1.0}, 5)
        if fails:
            raise ValueError("the cause")
        tracking.log({"loss": 0.5}, 10)


def test_a_run() -> None:
    trackers = Noting(), Noting()
    train(*trackers)
    for tracker in trackers:
        assert tracker.calls == [
            ("start", "fit", {"epochs": 2}),
            ("log", {"loss": 1.0}, 5),
            ("log", {"loss": 0.5}, 10),
            ("finish", False),
        ]


def test_other_ranks_track_nothing() -> None:
    tracker = Noting()
    train(tracker, rank=1)
    assert tracker.calls == []


def test_training_fails() -> None:
    tracker = Noting()
    with pytest.raises(ValueError, match="the cause"):
        train(tracker, fails=True)
    assert [call[0] for call in tracker.calls] == ["start", "log", "finish"]
    assert tracker.calls[-1] == ("finish", True)


@pytest.mark.parametrize("method", ["start", "log", "finish"])
@pytest.mark.parametrize("first", [True, False])
def test_a_tracker_fails(method: str, first: bool) -> None:
    """Those that have started are finished."""
    bad, good = Noting(method), Noting()
    with pytest.raises(OSError, match="no disk"):
        train(*((bad, good) if first else (good, bad)))
    started = "start" in [call[0] for call in good.calls]
    assert started == (not first or method != "start")
    assert [call[0] for call in good.calls].count("finish") == started


def test_what_is_no_tracker_is_named() -> None:
    with pytest.raises(TypeError, match="methods start, log and finish, but int has no start"):
        check_trackers([3])  # type: ignore[list-item]
