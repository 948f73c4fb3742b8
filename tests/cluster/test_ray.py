"""Ranks that are actors of a Ray cluster, of one node on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_ranks.py"

pytest.importorskip("ray", reason="the recipe for Ray needs: pip install ray")


def test_actors_are_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--ranks", "2"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank (\d) \((.*)\): error (\S+), replicas (\w+)", done.stdout)
    assert [line[:2] for line in lines] == [("0", "shm"), ("1", "shm")]
    assert float(lines[0][2]) < 0.2
    assert lines[0][2:] == lines[1][2:]
