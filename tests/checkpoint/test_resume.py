"""A run that goes on from a checkpoint is the run that was not interrupted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.networks import distance, parameters
from support.on_device import on_gpu
from support.rank_pool import RankPool

from checkpoint.runs import RUNS, STEPS, Run


def whole_and_saved(comm: Any, name: str, folder: str, keep: int) -> str:
    run = Run(comm, name, folder, keep=keep)
    answer = run.go(range(1, STEPS + 1))
    run.checkpoints.wait()
    run.checkpoints.close()
    return answer


def resume_run(comm: Any, name: str, folder: str, step: int) -> tuple[str, Any]:
    run = Run(comm, name, folder)
    assert run.checkpoints.resume(step) == step
    extra = run.checkpoints.extra
    answer = run.go()
    run.checkpoints.close()
    return answer, extra


def size_of(name: str) -> int:
    return 4 if name in ("nodes", "schedule", "in flight") else 2


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_to_the_bit(shm: RankPool, name: str, tmp_path: Path, every: int) -> None:
    """From any step, also such as lie between merges, in the middle of epochs, and in flight."""
    size = size_of(name)
    (expected,) = set(shm.run(whole_and_saved, name, str(tmp_path), STEPS, size=size))
    found = sorted(tmp_path.glob("*-step-*"))
    assert len(found) == STEPS
    for step in range(2, STEPS + 1, every):
        folder = found[step - 1]
        only = tmp_path / "only"
        only.mkdir()
        shutil.copytree(folder, only / folder.name)
        answers = shm.run(resume_run, name, str(only), step, size=size)
        assert [answer for answer, _ in answers] == [expected] * size, step
        assert [extra for _, extra in answers] == [
            {"step": step - 1, "rank": rank} for rank in range(size)
        ]
        shutil.rmtree(only)


def end_on(comm: Any, name: str, folder: str, device: str, saves: list[int]) -> Any:
    """Go on from the last checkpoint, save after the steps in ``saves``, and return the end."""
    run = Run(comm, name, folder, device)
    run.checkpoints.resume()
    start = parameters(run.model)
    run.go(saves)
    run.checkpoints.wait()
    run.checkpoints.close()
    end = parameters(run.model)
    assert distance(start, end) > 1e-3
    return end


@pytest.mark.parametrize("device", ["cpu:0", on_gpu("cuda:0")])
@pytest.mark.parametrize(
    ("name", "size"), [("torch", 1), ("means", 1), ("merges", 2), ("merges, batch norm", 2)]
)
def test_replicas_on_a_device(
    shm: RankPool, name: str, size: int, device: str, tmp_path: Path
) -> None:
    """Go on from a checkpoint at a merge, or between two, with running statistics."""
    for step in (5, 6):
        folder = str(tmp_path / f"{step}")
        expected = shm.run(end_on, name, folder, device, [step], size=size)
        found = shm.run(end_on, name, folder, device, [], size=size)
        for ours, other in zip(found, expected, strict=True):
            assert distance(ours, other) <= (1e-4 if device == "cuda:0" else 0)


def in_part(comm: Any, folder: str, name: str, until: int) -> Any:
    """Go on until a step, save there, and return the parameters."""
    run = Run(comm, name, folder)
    run.go([until], until, noise=0.0)
    run.checkpoints.wait()
    run.checkpoints.close()
    return parameters(run.model)


@pytest.mark.parametrize("name", ["sums", "torch", "embedding", "lstm"])
@pytest.mark.filterwarnings("ignore:the generator 'noise'")
def test_on_other_numbers_of_ranks(shm: RankPool, name: str, tmp_path: Path) -> None:
    """Sums of 4, 2, 3 ranks and 1 in turn are one process; states of series are shared out."""
    for part, (size, until) in enumerate([(4, 2), (2, 5), (3, 9), (1, STEPS)]):
        found = shm.run(in_part, str(tmp_path / "turns"), name, until, size=size)
        assert part < 3 or len(found) == 1
    (alone,) = shm.run(in_part, str(tmp_path / "alone"), name, STEPS, size=1)
    assert distance(found[0], alone) < 1e-4


def merged_or_saved(comm: Any, name: str, folder: str, until: int) -> Any:
    """Save in the middle of what ranks learn alone; return what a merge makes of it then."""
    run = Run(comm, name, folder)
    run.go([until], until, noise=0.0)
    run.checkpoints.wait()
    run.model.merge()
    run.checkpoints.close()
    return parameters(run.model)


def only_resumed(comm: Any, name: str, folder: str) -> Any:
    run = Run(comm, name, folder)
    run.checkpoints.resume()
    run.checkpoints.close()
    assert run.model.unmerged_steps == 0
    run.model.check_replicas()
    return parameters(run.model)


@pytest.mark.parametrize(
    ("name", "until"),
    [
        ("merges", 2),
        ("merges", 8),
        ("merges by Bayes", 7),
        ("merges, torch", 8),
        ("nodes", 8),
        ("in flight", 2),
    ],
)
@pytest.mark.filterwarnings("ignore:the generator 'noise'")
def test_other_ranks_begin_with_what_a_merge_would_give(
    shm: RankPool, name: str, until: int, tmp_path: Path
) -> None:
    size = max(3, size_of(name))
    expected = shm.run(merged_or_saved, name, str(tmp_path), until, size=size)[0]
    for other in (2, 1) if size == 3 else (2,):
        found = shm.run(only_resumed, name, str(tmp_path), size=other)[0]
        assert distance(found, expected) < 1e-5


SCRIPT = Path(__file__).with_name("killed.py")
KILLS = 25
KINDS = ["sums", "merges", "merges in 8 bits", "schedule", "sharded", "lstm", "DASO", "trainer"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_time(kind: str, tmp_path: Path) -> None:
    """Runs whose ranks, all or some, are killed again and again end as one that is left alone.

    No checkpoint is half a one then, and nothing else is left beside them.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), kind, str(tmp_path), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = (tmp_path / "answers").read_text().split()
    assert len(answers) >= 2
    assert len(set(answers)) == 1
    for run in range(len(answers)):
        folder = tmp_path / str(run) / ("checkpoints" if kind == "trainer" else "")
        assert (folder / "latest").resolve().parent == folder
        for path in folder.iterdir():
            if path.name in ("latest", ".lock"):
                continue
            assert re.fullmatch(r"\d{6}-step-\d+", path.name)
            names = {each.name for each in path.iterdir()}
            ranks = json.loads((path / "run.json").read_text())["ranks"]
            assert names == {"run.json", *(f"rank-{n}.safetensors" for n in range(ranks))}
