"""The README's script runs as it stands there, under the launchers that this machine has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "python": [sys.executable],
    "tagi-ddp": [sys.executable, "-m", "tagi_ddp", "run", "-n", "2"],
    "mpirun": [
        *(str(BIN / "mpirun"), "-n", "2", "--allow-run-as-root", "--oversubscribe"),
        sys.executable,
    ],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 22
    path = tmp_path / "script.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script(script: Path, launcher: str) -> None:
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(script)],
        cwd=script.parent,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = re.findall(r"rank ([01]): ([0-9a-f]{16})", done.stdout)
    assert sorted(rank for rank, _ in hashes) == (["0"] if launcher == "python" else ["0", "1"])
    assert len({digest for _, digest in hashes}) == 1
