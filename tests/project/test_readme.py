"""The README's script prints what the README shows, under every launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, scripts

README = ROOT / "README.md"
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


@pytest.fixture(scope="module")
def shown() -> dict[str, list[str]]:
    """Return what the README says its script prints, by the command, without the hashes."""
    (block,) = (block for block in blocks(README) if block.kind == "console")
    found: dict[str, list[str]] = {}
    for part in block.text.split("$ ")[1:]:
        command, *lines = part.splitlines()
        found[command.removesuffix(" script.py")] = [line.rpartition(" ")[0] for line in lines]
    return found


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        *(("python", 1), ("tagi-ddp", 2), ("mpirun", 2)),
        pytest.param("tagi-ddp", 4, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_the_script_of_the_readme(
    launcher: str, ranks: int, shown: dict[str, list[str]], tmp_path: Path
) -> None:
    _, script = scripts(README)
    assert len(script.code.splitlines()) <= 24
    (tmp_path / "script.py").write_text(script.code)
    command = [str(ranks) if word == "2" else word for word in LAUNCHERS[launcher]]
    done = subprocess.run(
        [*command, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # torchrun's ranks write to one pipe, and a line may end behind the next one.
    found = re.findall(r"((?:\[\d\] )?RMSE.*?) ([0-9a-f]{16})(?![0-9a-f])", done.stdout)
    lines, hashes = zip(*found, strict=True)
    assert len(set(hashes)) == 1
    expected = shown["python" if ranks == 1 else f"tagi-ddp run -n {ranks}"]
    if launcher in ("mpirun", "torchrun"):  # which put no rank in front
        expected = [line.partition(" ")[2] for line in expected]
    assert sorted(lines) == expected
