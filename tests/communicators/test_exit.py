"""A process that ends while another of its threads is in an operation ends with its own status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
import sys, threading, time
import numpy as np, tagi_ddp
comm = tagi_ddp.init({backend!r}, timeout=20)
comm.barrier()

def wait():
    if comm.rank == 0:
        comm.{operation}
    else:
        time.sleep(30)

threading.Thread(target=wait, daemon=True).start()
time.sleep(0.5)
sys.exit(comm.rank + 3)
"""


@pytest.mark.parametrize("operation", ["barrier()", "recv(np.ones(3), 1)"])
@pytest.mark.parametrize(
    ("backend", "levels"), [("shm", ""), pytest.param("gloo", "0", marks=pytest.mark.slow)]
)
def test_a_daemon_thread_in_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, levels: str, operation: str
) -> None:
    monkeypatch.setenv("TAGI_DDP_TWO_LEVELS", levels)
    script = tmp_path / "script.py"
    script.write_text(SOURCE.format(backend=backend, operation=operation))
    command = [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", "--timeout", "60", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode in (3, 4), done.stderr
    assert "SIG" not in done.stderr
    assert "terminate called" not in done.stderr
