"""A Lightning fit, unchanged but for the name of the backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.rank_pool import mpirun, worker_environment

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "shm": lambda: [sys.executable, "-m", "tagi_ddp", "run", "-n", "2"],
    "mpi": lambda: [*mpirun(2), sys.executable],
}


@pytest.mark.parametrize("carrier", LAUNCHERS)
def test_a_fit_gives_gloos_result(carrier: str) -> None:
    script = Path(__file__).with_name("lightning_fit.py")
    done = subprocess.run(
        [*LAUNCHERS[carrier](), str(script)],
        env=worker_environment({"TAGI_DDP_TORCH_CARRIER": carrier}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("equal") == 2
