"""Starts the ranks of a row family: under mpirun, so that mpi4py can take part, if it is there."""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measure import Row

ROOT = Path(__file__).parents[2]
LIMIT = 5400.0  # seconds for a family; some train for long


def measure_families(families: Sequence[str], ranks: int, quick: bool) -> dict[str, list[Row]]:
    """Run ``benchmarks.families.<family>``, one after the other, on ``ranks`` new processes."""
    place = os.environ.get("TMPDIR", "/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tagi_ddp_bench.", dir=place) as folder:
        module = ["-m", "benchmarks.harness.rank", folder, *families] + ["--quick"] * quick
        mpirun = find_open_mpi()
        if mpirun:
            command = [*_mpirun(mpirun, ranks, folder), sys.executable, *module]
        else:
            command = [sys.executable, "-m", "tagi_ddp", "run", "-n", str(ranks), *module]
        _run(command, folder, f"benchmark {', '.join(families)} on {ranks} ranks")
        rows: dict[str, list[Row]] = pickle.loads((Path(folder) / "rows").read_bytes())
        return rows


def find_open_mpi() -> str | None:
    """Return the path of Open MPI's mpirun, that of this interpreter's environment first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("mpirun", path=path)
    return program if program and "Open MPI" in mpirun_version(program) else None


def mpirun_version(program: str) -> str:
    """Return the first line of what ``mpirun --version`` says."""
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    return answer.stdout.partition("\n")[0]


def _mpirun(program: str, ranks: int, folder: str) -> list[str]:
    """Return the beginning of the command line, with Open MPI's best settings for one host."""
    # With a core for each rank, who waits does best to keep it; else to yield it.
    crowded = ranks > len(os.sched_getaffinity(0))
    command = [program, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    command += ["--mca", "mpi_yield_when_idle", str(int(crowded))]
    # Ranks that fail leave their segments there.
    command += ["--mca", "btl_sm_backing_directory", folder]
    return command + ["--allow-run-as-root"] * (os.geteuid() == 0)


def _run(command: Sequence[str], folder: str, title: str) -> None:
    # torch's optimizers leave a folder, else in TMPDIR.
    own = {"TORCHINDUCTOR_CACHE_DIR": folder, "TAGI_DDP_SECRET": secrets.token_hex()}
    environment = {**os.environ, **own}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL) as process:
        try:
            status = process.wait(LIMIT)
        except BaseException:
            process.terminate()  # mpirun and our own launcher end their ranks
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if status != 0:
        raise SystemExit(f"{title}: failed with status {status}")
