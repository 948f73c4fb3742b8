"""Group strategies under Lightning's Trainer, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.rank_pool import TESTS, worker_environment


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.slow
def test_four_ranks(package: str) -> None:
    """Everything of `lightning_ranks`, which is one run as Lightning is slow to import."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("lightning_ranks.py")), package],
        env=worker_environment({"PYTHONPATH": str(TESTS)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output[-8000:]


def test_strategies_without_lightning() -> None:
    code = "import sys, tagi_ddp.strategy; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "tagi_ddp" in loaded
    assert not loaded & {"lightning", "pytorch_lightning", "lightning_fabric"}
