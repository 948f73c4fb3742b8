"""No order of calls and no sizes of arrays end the process: the engine checks neither."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import any_order
from support.on_device import on_gpu
from support.rank_pool import worker_environment

PATHS = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
SLOW = pytest.mark.slow
COMPUTES = ["engine", "native", "torch", "auto", "cpu:0"]  # the last: a replica on a device


def run(compute: str, first: int, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.any_order", compute, str(first), str(count)],
        env=worker_environment({"PYTHONPATH": os.pathsep.join(PATHS)}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    number = [line for line in done.stdout.splitlines() if line.isdecimal()][-1:]
    assert done.returncode == 0, f"program {number} of {compute}: {done.returncode} {done.stderr}"


@pytest.mark.parametrize(
    "compute",
    [*COMPUTES[:3], *(pytest.param(name, marks=SLOW) for name in COMPUTES[3:]), on_gpu("cuda:0")],
)
def test_random_programs(compute: str) -> None:
    run(compute, 0, 50)


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("first", [10_000, 20_000, 30_000, 40_000])
def test_many_random_programs(compute: str, first: int) -> None:
    run(compute, first, 2_500)


def test_all_of_pytagis_methods_are_called() -> None:
    from pytagi.nn import OutputUpdater, Sequential

    with tempfile.TemporaryDirectory() as folder:
        called = any_order.Program("auto", 0, Path(folder)).calls()
    missing = {name for name in vars(Sequential) if not name.startswith("_")} - called.keys()
    assert missing == set()
    updates = {name for name in vars(OutputUpdater) if not name.startswith("_")}
    assert updates == {"update", "update_using_indices", "update_heteros", "device"}
