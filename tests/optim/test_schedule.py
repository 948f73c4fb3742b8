"""The schedule: its phases, its skips, and that what is sent is merged once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.optim import Skips, Sync, SyncSchedule

ARGUMENTS = st.fixed_dictionaries(
    {
        "total_epochs": st.integers(1, 30),
        "warmup_epochs": st.integers(0, 5),
        "cooldown_epochs": st.integers(0, 5),
        "stability_level": st.floats(0, 1),
        "max_global_skips": st.integers(1, 40),
        "skip_reduction_factor": st.integers(2, 5),
        "local_skip_factor": st.integers(1, 50),
    }
)
LOSSES = st.lists(st.floats(-1e6, 1e6), max_size=35)


@given(ARGUMENTS, LOSSES)
def test_skips_keep_their_order(arguments: dict[str, Any], losses: list[float]) -> None:
    schedule = SyncSchedule(**arguments)
    for loss in losses:
        skips = schedule.skips
        assert 1 <= skips.batches_to_wait <= skips.global_skip <= arguments["max_global_skips"]
        assert 1 <= skips.local_skip <= skips.global_skip
        schedule.end_epoch(loss)


@given(ARGUMENTS, LOSSES, st.integers(1, 60))
def test_what_is_sent_is_merged_once(
    arguments: dict[str, Any], losses: list[float], batches: int
) -> None:
    schedule = SyncSchedule(**arguments)
    for loss in losses:
        skips, cycling = schedule.skips, schedule.phase == "cycling"
        sent: int | None = None
        senders = []
        for batch in range(batches):
            sync = schedule.after(batch, batches)
            last = batch == batches - 1
            assert sync.blocking == (last or not cycling)
            if not cycling:
                assert sync == Sync(blocking=True)
                continue
            in_flight = sent is not None
            due = sent is not None and (last or batch == sent + skips.batches_to_wait)
            assert sync.merge == (batch - sent if due and sent is not None else 0)
            sent = None if due else sent
            if sync.send is not None:
                assert sent is None, "two copies are in flight"
                assert batch % skips.global_skip == 0
                sent = batch
                senders.append(sync.send)
            if not last:
                assert (sync.send is None) == (batch % skips.global_skip > 0)
                often = batch % skips.local_skip == 0
                assert sync.local == (often or sync.send is not None or in_flight)
        assert sent is None, "a copy is in flight between epochs"
        assert senders == list(range(len(senders)))
        schedule.end_epoch(loss)


@pytest.mark.parametrize(
    ("batches", "arguments", "alone"),
    [
        (20, {}, [3, 5, 7, 11, 13, 15]),  # each wait is of two batches: 1 and 2, 9 and 10, 17, 18
        (17, {"local_skip_factor": 1}, [3, 4, 5, 6, 7, 11, 12, 13, 14, 15]),
        (12, {"max_global_skips": 4, "local_skip_factor": 1}, [2, 3, 6, 7, 10]),
    ],
)
def test_ranks_of_a_node_synchronize_while_a_copy_is_in_flight(
    batches: int, arguments: dict[str, int], alone: list[int]
) -> None:
    schedule = SyncSchedule(10, warmup_epochs=0, cooldown_epochs=0, **arguments)
    syncs = [schedule.after(batch, batches) for batch in range(batches)]
    assert [i for i, sync in enumerate(syncs) if not (sync.local or sync.blocking)] == alone


def phases(count: int, **arguments: int) -> str:
    schedule, letters = SyncSchedule(**arguments), ""
    for _ in range(count):
        letters += {"warmup": "w", "cycling": ".", "cooldown": "c"}[schedule.phase]
        schedule.end_epoch(1.0)
    return letters


def test_phases() -> None:
    assert phases(12, total_epochs=10, warmup_epochs=3, cooldown_epochs=2) == "www.....cccc"
    assert phases(6, total_epochs=5, warmup_epochs=0, cooldown_epochs=0) == ".....c"
    assert phases(5, total_epochs=4, warmup_epochs=3, cooldown_epochs=3) == "wwwcc"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [(8, 2, 2), (4, 1, 1), (2, 1, 1), (1, 1, 1), (8, 2, 2)]),
        ({"max_global_skips": 1}, [(1, 1, 1), (1, 1, 1)]),
        ({"max_global_skips": 20, "skip_reduction_factor": 3}, [(20, 5, 5), (6, 1, 1), (2, 1, 1)]),
        ({"max_global_skips": 3, "local_skip_factor": 1}, [(3, 3, 1), (1, 1, 1), (3, 3, 1)]),
    ],
)
def test_a_stable_loss_shortens_the_skips(
    arguments: dict[str, int], expected: list[tuple[int, int, int]]
) -> None:
    schedule = SyncSchedule(1000, warmup_epochs=0, cooldown_epochs=0, **arguments)
    schedule.end_epoch(1.0)  # from here on it is stable
    for skips in expected:
        for _ in range(2):
            assert schedule.skips == Skips(*skips)
            schedule.end_epoch(1.0)


@pytest.mark.parametrize(
    ("losses", "shortened"),
    [
        ([1.0, 0.94, 0.88, 0.82], False),
        ([1.0, 0.96, 0.92], True),  # each improves by less than 5 % of the best one
        ([1.0, 1.1, 0.9, 0.95], False),  # one epoch without improvement
        ([1.0, 1.2, 1.1], True),  # better than the last one, not than the best one
        ([-1.0, -1.1, -1.2, -1.3], False),
        ([-1.0, -1.01, -1.02], True),
        ([0.0, 0.0, 0.0], True),
    ],
)
def test_what_is_stable(losses: list[float], shortened: bool) -> None:
    schedule = SyncSchedule(1000, warmup_epochs=0, cooldown_epochs=0)
    for loss in losses:
        schedule.end_epoch(np.float32(loss))
    assert (schedule.skips.global_skip < 8) == shortened


def test_the_best_loss_of_warmup_counts_but_not_its_epochs() -> None:
    schedule = SyncSchedule(1000, warmup_epochs=5)
    for _ in range(6):
        schedule.end_epoch(1.0)
    assert schedule.skips.global_skip == 8  # stable for one cycling epoch
    schedule.end_epoch(1.0)
    assert schedule.skips.global_skip == 4


@given(ARGUMENTS, LOSSES, LOSSES)
def test_resume(arguments: dict[str, Any], before: list[float], after: list[float]) -> None:
    schedule, resumed = SyncSchedule(**arguments), SyncSchedule(**arguments)
    for loss in before:
        schedule.end_epoch(loss)
    resumed.load_state_dict(schedule.state_dict())
    for loss in after:
        assert vars(schedule) == vars(resumed)
        schedule.end_epoch(loss)
        resumed.end_epoch(loss)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"total_epochs": 0}, ValueError, "total_epochs must be at least 1, got 0"),
        ({"warmup_epochs": -1}, ValueError, "warmup_epochs must be at least 0"),
        ({"cooldown_epochs": 1.0}, TypeError, "cooldown_epochs must be an integer, got 1.0"),
        ({"stability_level": -0.1}, ValueError, "stability_level must be 0 or more, got -0.1"),
        ({"stability_level": float("nan")}, ValueError, "stability_level"),
        ({"stability_level": "a"}, TypeError, "stability_level must be a number, got 'a'"),
        ({"max_global_skips": 0}, ValueError, "max_global_skips must be at least 1"),
        ({"skip_reduction_factor": 1}, ValueError, "skip_reduction_factor must be at least 2"),
        ({"local_skip_factor": 0}, ValueError, "local_skip_factor must be at least 1"),
        ({"total_epochs": 0, "stability_level": True}, TypeError, "stability_level"),
        ({"max_global_skips": 0, "local_skip_factor": "4"}, TypeError, "local_skip_factor"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SyncSchedule(**{"total_epochs": 10, **arguments})


def test_wrong_calls() -> None:
    schedule = SyncSchedule(10)
    with pytest.raises(ValueError, match="batch is 3, but there are 3, numbered from 0"):
        schedule.after(3, 3)
    with pytest.raises(TypeError, match=r"batches must be an integer, got 2\.5"):
        schedule.after(0, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss must be finite, got nan"):
        schedule.end_epoch(float("nan"))
    with pytest.raises(TypeError, match="loss must be a number, got None"):
        schedule.end_epoch(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state lacks \['best'\]"):
        schedule.load_state_dict({k: v for k, v in schedule.state_dict().items() if k != "best"})
    assert schedule.epoch == 0
