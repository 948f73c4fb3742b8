"""A process that ends while another of its threads is in an operation ends with its own status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Threads that want the interpreter's lock again and again while the process ends.
BUSY = """
import sys, threading, time
import numpy as np, tagi_ddp
comm = tagi_ddp.init("shm", timeout=5)
comm.barrier()

def reduce():
    while True:
        comm.all_reduce(np.ones(10))

for _ in range(2):
    threading.Thread(target=reduce, daemon=True).start()
time.sleep(0.2)
sys.exit(3)
"""
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
    status, text = run(tmp_path, SOURCE.format(backend=backend, operation=operation))
    assert status in (3, 4), text
    assert "SIG" not in text
    assert "terminate called" not in text


@pytest.mark.parametrize("times", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_daemon_threads_in_one_operation_after_another(tmp_path: Path, times: int) -> None:
    for _ in range(times):
        status, text = run(tmp_path, BUSY)
        assert status == 3, text
        assert "terminate called" not in text


def run(folder: Path, source: str) -> tuple[int, str]:
    """Return the exit status of two ranks that run ``source``, and what they wrote to stderr."""
    script = folder / "script.py"
    script.write_text(source)
    command = [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", "--timeout", "60", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stderr
