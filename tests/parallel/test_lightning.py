"""A Lightning fit, unchanged but for the name of the backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rank_pool import worker_environment


def test_a_fit_gives_gloos_result() -> None:
    script = Path(__file__).with_name("lightning_fit.py")
    done = subprocess.run(
        [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", str(script)],
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("equal") == 2
