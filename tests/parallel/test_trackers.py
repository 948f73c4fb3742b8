"""Trackers of the trainer: rank 0 alone calls them, and their errors end all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.rank_pool import RankPool

from parallel.support import torch_group
from parallel.test_callbacks import Fit, data, network
from tagi_ddp.parallel import ParallelMixin


class Notes:
    def __init__(self, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        self.calls.append(("start", name, dict(settings)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", sorted(metrics), step))
        if self.fails:
            raise OSError("no disk")

    def finish(self, failed: bool) -> None:
        self.calls.append(("finish", failed))


def tracked(comm: Any, folder: str, fails: bool) -> Any:
    tracker = Notes(fails)
    with (
        torch_group(comm, f"{folder}/store"),
        ParallelMixin({"name": "fit", "exp_dir": folder}) as trainer,
    ):
        try:
            options: Any = {"epochs": 2, "batch_size": 8, "held_out": data(1)}
            trainer.train(Fit(), network(), data(), trackers=[tracker], **options)
            return tracker.calls
        except Exception as error:
            return tracker.calls, f"{type(error).__name__}: {error}"


def test_rank_0_alone_tracks(shm: RankPool, tmp_path: Path) -> None:
    first, second = shm.run(tracked, str(tmp_path), False, size=2)
    settings = {"length of data": 40, "batch_size": 8, "seed": 0, "epochs": 2}
    assert first == [
        ("start", "fit", settings),
        ("log", ["held_out_loss", "loss"], 5),
        ("log", ["held_out_loss", "loss"], 10),
        ("finish", False),
    ]
    assert second == []


def test_an_error_of_a_tracker_ends_all_ranks(shm: RankPool, tmp_path: Path) -> None:
    (calls, own), (_, other) = shm.run(tracked, str(tmp_path), True, size=2, fresh=True)
    assert [call[0] for call in calls] == ["start", "log", "finish"]
    assert calls[-1] == ("finish", True)
    assert own == "OSError: no disk"
    assert "no disk" in other


@pytest.mark.parametrize("wrong", [3, Fit()])
def test_what_is_no_tracker_is_named(tmp_path: Path, wrong: Any) -> None:
    with (
        ParallelMixin({"name": "fit", "exp_dir": str(tmp_path)}) as trainer,
        pytest.raises(TypeError, match="trackers must have the methods start, log and finish"),
    ):
        trainer.train(Fit(), network(), data(), epochs=1, batch_size=8, trackers=[wrong])
