"""The examples of trackers and of a search, with MLflow, W&B and Optuna themselves, offline."""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MISSING = [name for name in ("mlflow", "wandb", "optuna") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {MISSING}: pip install '.[trackers]'"),
]


def run(folder: Path, ranks: int, name: str, *arguments: str) -> str:
    launcher = ["-m", "tagi_ddp", "run", "-n", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mlflow(tmp_path: Path) -> None:
    run(tmp_path, 2, "trackers.py", "mlflow")
    with sqlite3.connect(tmp_path / "runs.db") as database:
        (status,) = database.execute("select status, name from runs").fetchall()
        assert status == ("FINISHED", "diabetes")
        steps = database.execute("select step from metrics where key = 'loss'").fetchall()
        assert sorted(step for (step,) in steps) == [18, 36, 54, 72, 90]
        assert ("20",) in database.execute("select value from params where key = 'batch_size'")


def test_wandb(tmp_path: Path) -> None:
    output = run(tmp_path, 1, "trackers.py", "wandb")
    losses = re.findall(r"negative log-likelihood (\S+), then (\S+)", output)
    assert losses[0][1] < losses[0][0]
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"held_out_loss" in path.read_bytes()


def test_a_search_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    one, two = (run(tmp_path, ranks, "search.py", "--trials", "12") for ranks in (1, 2))
    assert one == two
    loss = float(re.findall(r"loss (\S+) with", one)[0])
    assert loss < 1.3  # of who knows the mean and the deviation only: 1.42
