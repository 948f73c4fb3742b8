"""Restarts that cannot help: the same error at the same step, three times in a row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.elastic.messages import PREEMPTED
from tagi_ddp.launcher.failure import Failure
from tagi_ddp.launcher.restarts import Restarts, cause_of

SCRIPT = """
import os, sys
import numpy as np
from pytagi.nn import Linear, Sequential
from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.checkpoint import Checkpoints

how, rank = sys.argv[1], os.environ["RANK"]
with open("starts" + rank, "a") as file:
    starts = file.tell()
    file.write("x")
if how == "cannot begin":
    raise RuntimeError(f"no licence, says {object()} of rank {rank}")
if how == "status":
    sys.exit(3)
if how == "killed":
    os.kill(os.getpid(), 9)
x = np.random.default_rng(0).standard_normal((40, 4), np.float32)
elastic = how == "elastic"
with DDPSequential(
    Sequential(Linear(4, 1)), DDPConfig.from_env(), average=False, elastic=elastic
) as model:
    if how == "own loop":
        for step in range(4):
            model.learn(x[int(rank) :: 2], x[int(rank) :: 2, :1], 0.1)
        raise RuntimeError("a server is away")
    sampler = DistributedSampler(x, seed=1)
    with Checkpoints("saved", model, sampler=sampler) as checkpoints:
        first = checkpoints.resume()
        loop = model.steps if elastic else sampler.steps
        for step, share in loop(sampler, 10, 4, first) if elastic else loop(10, 4, first):
            if step == (6 if how != "moves on" else 3 * starts + 2) and starts < 4:
                raise RuntimeError("sample 7 is damaged")
            model.learn(x[share], x[share, :1], 0.1)
            checkpoints.save(step + 1)
print("done", flush=True)
"""


STATUS = ("status", [3], 3, "exit status 3 (before the first step)")
PLAIN = ("plain", [3], 1, "RuntimeError: sample 7 is damaged (at step 6)")


@pytest.mark.parametrize(
    ("how", "starts", "status", "cause"),
    [
        ("cannot begin", [3], 1, "RuntimeError: no licence, says <object object at ...> of ... ("),
        ("moves on", [5], 0, None),
        pytest.param(*STATUS, marks=pytest.mark.slow),
        pytest.param(*PLAIN, marks=pytest.mark.slow),
        pytest.param("own loop", [6], 1, None, marks=pytest.mark.slow),
        pytest.param("killed", [6], 137, None, marks=pytest.mark.slow),
        pytest.param("elastic", [1, 2, 3], 1, "at step 6", marks=pytest.mark.slow),
    ],
)
def test_starts(
    tmp_path: Path, how: str, starts: list[int], status: int, cause: str | None
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tagi_ddp", "run", "--max-restarts", "5", "script.py", how]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    assert 1 + done.stderr.count("and start again") in starts, done.stderr
    last = done.stderr.splitlines()[-1]
    assert ("3 times in a row" in last) == (cause is not None)
    if cause is not None:
        assert cause in last
        assert last.endswith("no more restarts")


def failure(cause: str, exitcode: int = 1) -> Failure:
    return Failure(0, "failed", exitcode, 0.0, cause=cause)


@given(st.lists(st.sampled_from(["a", "b", "", "warned"]), max_size=12), st.integers(0, 8))
def test_only_three_alike_end_restarts(causes: list[str], left: int) -> None:
    """Unknown causes are alike with none; a warning is no failure, and uses no restart."""
    restarts, row, last = Restarts(left), 0, ""
    for cause in causes:
        if cause == "warned":
            restarts.count(failure("", PREEMPTED), float("inf"))
            assert restarts.again == (left > 0)
            continue
        row = row + 1 if cause and cause == last else 1
        last = cause
        if row >= 3:
            left = 0
        restarts.count(failure(cause), float("inf"))
        assert restarts.again == (left > 0)
        assert bool(restarts.reason) == (row >= 3)
        left = max(0, left - 1)


def test_ranks_that_fail_together_fail_once() -> None:
    """A rank that ran already when another failed alike shows nothing about a new start."""
    restarts = Restarts(9)
    restarts.count(failure("a"), 0.0)
    for _ in range(5):
        restarts.count(failure("a"), 0.0)
    assert restarts.alike == 1


@pytest.mark.parametrize(
    ("error", "other", "alike"),
    [
        ("E: at 0x7f3a of rank 1", "E: at 0x11 of rank 12", True),
        ("E: ranks 1, 2 and 3 differ", "E: ranks 0 and 2 differ", True),
        ("E: sample 7", "E: sample 8", False),
    ],
)
def test_causes(error: str, other: str, alike: bool) -> None:
    assert (cause_of(error, 3, True) == cause_of(other, 3, True)) == alike
    assert cause_of(error, 3, True) != cause_of(error, 4, True)
    assert cause_of(error, None, True) == ""
    assert "before the first step" in cause_of(error, None, False)
