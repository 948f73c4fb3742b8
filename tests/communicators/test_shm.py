"""The contract over shared memory; and how a process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from contract.whole import WholeContract
from support.rank_pool import worker_environment


class TestShm(WholeContract):
    backend = "shm"
    sizes = (2, 3, 4)


UNDER_WAY = """
import sys, time
import numpy as np
import tagi_ddp


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # when the interpreter ends


comm = tagi_ddp.init(timeout=20)
if comm.rank == 0:
    sys.work, sys.slow = comm.all_reduce(np.ones(1000), async_op=True), Slow()
else:
    time.sleep(1)
print("the end", flush=True)
"""


def test_a_process_ends_well_with_work_under_way(tmp_path: Path) -> None:
    """Of a call that rank 1 does not make, and of which nobody wants to know."""
    (tmp_path / "script.py").write_text(UNDER_WAY)
    done = subprocess.run(
        [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", "script.py"],
        cwd=tmp_path,
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] the end", "[1] the end"]
