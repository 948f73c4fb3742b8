"""A system that refuses a rank memory, threads, or an address of IPv4."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from contract.data import caught
from support.rank_pool import RankPool

from tagi_ddp.communicators import init

NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and the command ip"
)
JOB = """
import numpy as np, tagi_ddp
try:
    with tagi_ddp.init({backend!r}, timeout=30) as comm:
        total = np.ones(3)
        {work}
        print("sum", total[0])
except tagi_ddp.CommunicatorError as error:
    print(type(error).__name__, error)
"""
SUM = "comm.all_reduce(total)"


def run(folder: Path, backend: str, before: str = "", work: str = SUM, **more: str) -> str:
    """Return what two ranks print, of a shell that does something first."""
    script = folder / "script.py"
    script.write_text(JOB.format(backend=backend, work=work))
    launch = f"{sys.executable} -m tagi_ddp run -n 2 --timeout 60 {script}"
    done = subprocess.run(
        ["sh", "-c", f"{before} {launch}"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **more},
    )
    return done.stdout + done.stderr


@NEEDS_ROOT
@pytest.mark.parametrize("levels", ["", "0"])
def test_a_loopback_of_ipv6_alone(tmp_path: Path, levels: str) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6")
    enter = (
        "unshare --net sh -c 'ip link set lo up; ip address del 127.0.0.1/8 dev lo; exec \"$@\"' sh"
    )
    output = run(tmp_path, "gloo", f"exec {enter}", TAGI_DDP_TWO_LEVELS=levels)
    assert output.count("sum 2.0") == 2, output


def without_threads(comm: Any, job: str) -> tuple[str, str]:
    """Return the error of a rank that can start no thread, and of the other."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if comm.rank == 1:
        threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        error = caught(lambda: init("gloo", comm.rank, comm.size, job=job, timeout=3))
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    return type(error).__name__, str(error)


def test_no_threads_left() -> None:
    environment = {"TAGI_DDP_TWO_LEVELS": "0"}
    with contextlib.closing(RankPool("gloo", 2, environment=environment)) as pool:
        (other, _), (own, text) = pool.run(without_threads, "no threads")
    assert (other, own) == ("Timeout", "BackendUnavailable")
    assert "can't start new thread: raise `ulimit -u`" in text


@pytest.mark.slow
def test_no_memory_to_map(tmp_path: Path) -> None:
    output = run(tmp_path, "gloo", "ulimit -v 2500000;")
    assert output.count("BackendUnavailable") == 2, output
    assert "Raise `ulimit -v`" in output
