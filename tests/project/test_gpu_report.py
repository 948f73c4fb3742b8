"""`make gpu`: it runs all that there is for GPUs, and its report is whole whenever it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pathlib, time
import pytest

pytestmark = pytest.mark.gpu


FOLDER = pathlib.Path(__file__).parent


def test_quick():
    (FOLDER / "quick").touch(exist_ok=False)  # and fails if it runs again


def test_slow():
    if (FOLDER / "pid").exists():
        return
    # Of the process that has started this worker.
    (FOLDER / "pid").write_text(str(os.getppid()))
    time.sleep(600)


def test_after():
    assert (FOLDER / "mended").exists()
"""
PROGRAM = """
import pathlib, sys

sys.path.insert(0, {benchmarks!r})
import gpu_report

gpu_report.STEPS, gpu_report.PYTHON = {steps!r}, sys.executable
gpu_report.WORKERS = 1
gpu_report.WORK = pathlib.Path({folder!r}) / "work"
sys.exit(gpu_report.main())
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import gpu_report

    return gpu_report


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the program with steps of its own; ends what is left of its tests."""
    (tmp_path / "test_this.py").write_text(TESTS)

    def start(*steps: tuple[str, str, int], rest: bool = False) -> subprocess.Popen[bytes]:
        text = PROGRAM.format(
            benchmarks=str(ROOT / "benchmarks"), folder=str(tmp_path), steps=steps
        )
        command = [sys.executable, "-c", text, "--report", str(tmp_path / "gpu.json")]
        command += ["--rest"] * rest
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    yield start
    pid = tmp_path / "pid"
    if pid.exists():
        subprocess.run(["kill", "-KILL", pid.read_text()], stderr=subprocess.DEVNULL)


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "gpu.json").read_text())


def until_one_has_passed(process: subprocess.Popen[bytes], folder: Path) -> None:
    last = folder / "gpu.txt"  # the second of the two files
    while not last.exists() or "1 passed" not in last.read_text():
        assert process.poll() is None
        time.sleep(0.1)


def outcomes(step: dict[str, Any]) -> dict[str, str]:
    return {result["name"].split("::")[-1]: result["outcome"] for result in step["results"]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed(number: signal.Signals, start: Start, tmp_path: Path) -> None:
    process = start(("tests", str(tmp_path), 500), ("rows", "gpu_steps", 60))
    until_one_has_passed(process, tmp_path)
    process.send_signal(number)
    process.wait()
    found = read(tmp_path)
    told = number == signal.SIGTERM
    assert found["state"].startswith("ended early" if told else "not finished")
    tests, rows = found["steps"]
    assert outcomes(tests) == {"test_quick": "passed"}
    assert [tests["state"], rows["state"]] == [
        "ended early" if told else "running",
        "has not begun",
    ]
    text = (tmp_path / "gpu.txt").read_text()
    for test in ("test_slow", "test_after"):
        assert re.search(f"no result of .*::{test}\n", text)
    assert "- rows, gpu_steps: has not begun\n" in text
    assert text.count("no result of") == 2


def test_rest(start: Start, tmp_path: Path) -> None:
    """Go on from a report: what has passed does not run again, what has not, or failed, does."""
    steps = [("tests", str(tmp_path), 500)]
    assert start(*steps, rest=True).wait() == 2  # There is no report.
    process = start(*steps)
    until_one_has_passed(process, tmp_path)
    process.terminate()
    process.wait()
    assert start(*steps, rest=True).wait() == 1
    (found,) = read(tmp_path)["steps"]
    assert outcomes(found) == {
        "test_quick": "passed",
        "test_slow": "passed",
        "test_after": "failed",
    }
    (tmp_path / "mended").touch()
    assert start(*steps, rest=True).wait() == 0
    (found,) = read(tmp_path)["steps"]
    assert found["state"] == "done"
    assert set(outcomes(found).values()) == {"passed"}
    assert len(found["results"]) == 3
    (tmp_path / "test_this.py").unlink()  # of which nothing is left to do
    assert start(*steps, rest=True).wait() == 0
    assert (tmp_path / "gpu.txt").read_text().count("goes on from: ") == 3


@pytest.mark.slow
def test_time_limit_of_a_step(start: Start, tmp_path: Path) -> None:
    process = start(("tests", str(tmp_path), 6), ("tests", "tests/compute/test_gpu.py", 60))
    status = process.wait()
    slow, there = read(tmp_path)["steps"]
    assert slow["state"] == "out of time"
    assert "test_after" not in outcomes(slow)
    assert there["state"] == "done"
    assert read(tmp_path)["state"] == "finished"
    assert status == 1
    if not torch.cuda.is_available():
        assert set(outcomes(there).values()) == {"skipped"}
        text = (tmp_path / "gpu.txt").read_text()
        assert re.search(r"test_gpu.py: \d+ for: torch finds no GPU\n", text)


def test_all_that_there_is_for_gpus(program: ModuleType) -> None:
    # The marker itself, and fixtures and parameters that have it.
    types = "gpu: RankPool|devices: Devices|accelerator: str"
    marker = re.compile(f"mark[.]gpu|gpu=True|import on_gpu|{types}")
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if marker.search(path.read_text()) and path != Path(__file__)
    }
    families = {path.stem for path in (ROOT / "benchmarks" / "families").glob("gpu_*.py")}
    steps = {
        kind: {name for other, of, _ in program.STEPS if other == kind for name in of.split()}
        for kind in ("tests", "rows")
    }
    assert steps == {"tests": marked, "rows": families}


def test_wheels_that_it_takes(program: ModuleType) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    needs = project.partition("\ndependencies = [")[2].partition("]")[0]
    assert re.findall(r'^  "(.*?)"', needs, re.MULTILINE) == list(program.NEEDS)
    [build] = re.findall(r"^requires = (\[.*\])", project, re.MULTILINE)
    assert set(json.loads(build)) <= set(program.BUILD)
    assert set(program.TEST) <= set(re.findall(r'"(.*?)"', project))
