"""A short campaign of random faults; `make chaos` is the long one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.faults import KINDS, Fault, Report, broken_promises

CAMPAIGN = Path(__file__).with_name("campaign.py")
ELASTIC = Path(__file__).with_name("elastic.py")
EDGE = Path(__file__).with_name("edge.py")
EVERY_CALL = Path(__file__).with_name("every_call.py")
FAULTS = 30


@pytest.mark.slow
def test_a_short_campaign() -> None:
    command = [sys.executable, str(CAMPAIGN), "--faults", str(FAULTS), "--first", "7000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "; 0 broke a promise" in done.stdout


@pytest.mark.slow
def test_a_short_campaign_of_elastic_jobs() -> None:
    command = [sys.executable, str(ELASTIC), "--events", "24", "--first", "7000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count("| sums") == done.stdout.count("| merges") == 2


@pytest.mark.slow
def test_a_short_campaign_of_kills_at_calls() -> None:
    command = [sys.executable, str(EVERY_CALL), "--jobs", "20", "--first", "7000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "; 0 broke a promise" in done.stdout


@pytest.mark.slow
def test_a_short_campaign_at_the_edge() -> None:
    command = [sys.executable, str(EDGE), "--faults", "24", "--first", "7000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "; 0 broke a promise" in done.stdout


def test_faults_are_the_same_each_time_and_of_all_kinds() -> None:
    faults = [Fault.draw(number) for number in range(400)]
    assert faults == [Fault.draw(number) for number in range(400)]
    assert {fault.kind for fault in faults} == set(KINDS)


def ends(fault: Fault) -> list[Report]:
    """Return how the ranks should end after a kill."""
    text = f"rank {fault.culprit} died"
    lost = [Report(1, {0: "a"}, "PeerLost", (fault.culprit,), text) for _ in range(fault.ranks)]
    lost[fault.culprit] = Report(-9, {0: "a"})
    return lost


FAULT = Fault(1, "kill", "shm", "fork", 3, 1, 4, "sum")


def test_kept_promises_are_recognised() -> None:
    assert broken_promises(FAULT, ends(FAULT), []) == []


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda r: r[0].hashes.update({0: "b"}), "replicas differ after step 0"),
        (lambda r: setattr(r[2], "status", None), "rank 2 never ended"),
        (lambda r: setattr(r[2], "error", ""), "rank 2: did not notice"),
        (lambda r: setattr(r[2], "error", "Timeout"), "rank 2: got Timeout"),
        (lambda r: setattr(r[2], "blamed", (0,)), r"rank 2: blames \(0,\)"),
        (lambda r: setattr(r[0], "changed", True), "rank 0: a step that was refused changed"),
    ],
)
def test_broken_promises_are_noticed(spoil, text) -> None:
    reports = ends(FAULT)
    spoil(reports)
    (broken,) = broken_promises(FAULT, reports, [])
    assert re.match(text, broken)


def test_what_is_left_behind_is_noticed() -> None:
    assert broken_promises(FAULT, ends(FAULT), ["a file"]) == ["a file was left behind"]
