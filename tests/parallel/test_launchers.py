"""dp under every launcher, with nothing initialised before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_pool import free_port, mpirun, worker_environment

FOLDER = Path(sys.executable).parent
PROGRAM = str(Path(__file__).parent / "wrap_everything.py")
LIMIT = 60


def run(command: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run the program; return what the ranks found."""
    done = subprocess.run(
        [*command, PROGRAM, str(folder)],
        env=worker_environment({"CUDA_VISIBLE_DEVICES": ""}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the program finds as one process."""
    [found] = run([sys.executable], tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.slow
def test_one_process(alone: dict[str, Any]) -> None:
    assert alone["kinds"] == ["Sequential", "Linear", False]
    assert alone["same"]
    assert alone["backend"] is None


@pytest.mark.parametrize("launcher", ["tagi-ddp", "torchrun", "mpirun"])
@pytest.mark.slow
def test_two_processes(launcher: str, alone: dict[str, Any], tmp_path: Path) -> None:
    command = {
        "tagi-ddp": [str(FOLDER / "tagi-ddp"), "run", "-n", "2"],
        "torchrun": [
            str(FOLDER / "torchrun"), "--nproc-per-node=2", f"--master-port={free_port()}",
        ],
        "mpirun": [*mpirun(2), sys.executable],
    }[launcher]  # fmt: skip
    found = run(command, tmp_path)
    assert len(found) == 2
    for rank in found:
        assert rank["kinds"] == ["DDPSequential", "DistributedDataParallel", False]
        assert rank["backend"] == "tagi_ddp"
        np.testing.assert_allclose(rank["gradient"], alone["gradient"], rtol=1e-4)
        np.testing.assert_allclose(rank["means"], alone["means"], rtol=1e-4)
        assert rank == found[0]


@pytest.mark.slow
def test_what_to_do_when_ranks_cannot_meet() -> None:
    """Numbers of ranks alone, and no place to meet."""
    code = "from torch import nn; from tagi_ddp.parallel import *\ndp(nn.Linear(1, 1), P())"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = dict(zip(names, "0201", strict=True))
    done = subprocess.run(
        [sys.executable, "-c", code.replace("P()", "ParallelConfig()")],
        env=worker_environment(numbers),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert "RuntimeError: rank 0 of 2 could not initialise torch.distributed (" in done.stderr
    assert "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port" in done.stderr
