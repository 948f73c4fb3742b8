"""The output of ranks in files: ``tagi-ddp run --log-dir``, and ``--tee``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
print("out", rank, "é")
print("error", rank, file=sys.stderr)
print("half", end="")
sys.stdout.flush()
if "bar" in sys.argv:
    for state in range(3):
        print(f"\\r{state}/2", end="", flush=True)
    print()
if "fail" in sys.argv and rank == "1" and not os.path.exists("failed"):
    open("failed", "w").close()
    sys.exit(3)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "tagi_ddp", "run", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def lines(folder: Path, rank: int) -> list[str]:
    return (folder / f"logs/a/rank-{rank}.log").read_text().splitlines()


@pytest.mark.parametrize("tee", [False, True])
def test_a_file_a_rank(tmp_path: Path, tee: bool) -> None:
    done = run(tmp_path, "--log-dir", "logs/a", *["--tee"] * tee, "script.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert sorted(lines(tmp_path, rank)) == [f"error {rank}", "half", f"out {rank} é"]
        for text, stream in (("out", done.stdout), ("error", done.stderr)):
            assert (f"[{rank}] {text} {rank}" in stream) == tee
    assert tee or done.stdout + done.stderr == ""


def test_restarts_append_and_the_launcher_speaks(tmp_path: Path) -> None:
    options = ["--log-dir", "logs/a", "--max-restarts", "1"]
    done = run(tmp_path, *options, "script.py", "bar", "fail")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 ended with exit status 3; all ranks were ended, and start" in done.stderr
    found = lines(tmp_path, 1)
    assert found.count("out 1 é") == 2
    assert "0/2" not in "".join(found)  # the last state of a bar only
    assert found.count("2/2") == 2


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "--tee needs --log-dir" in run(tmp_path, "--tee", "script.py").stderr
    done = run(tmp_path, "--log-dir", "file/a", "script.py")
    assert done.returncode == 2
    assert "file" in done.stderr
    assert "Not a directory" in done.stderr
