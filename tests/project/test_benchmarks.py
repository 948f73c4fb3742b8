"""The benchmarks run, and say what they measured; how fast anything is, is not tested here."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tagi_ddp import init

ROOT = Path(__file__).parents[2]
GPU_TARGETS = {
    "gpu_steps": [1 / 3, None, None, 1 / 5],
    "gpu_calls": [None, None, None],
    "gpu_exchange": [5.0, 0.9, None, None],
}
ALL_GPU_TARGETS = [
    target
    for family in ("gpu_steps", "gpu_calls", "gpu_calls", "gpu_exchange")
    for target in GPU_TARGETS[family]
]
# What a machine may lack, as its rows say.
MAY_LACK = "GPU|pip install|TAGI_DDP_UCI_DATA|Open MPI|iproute2|unshare|tun|no figure was published"
KEYS = ["name", "ours", "other", "ratio", "target", "unit", "machine", "missing"]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short name, as Open MPI puts sockets there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_quick_run(tmp_path: Path, scratch: Path) -> None:
    output = tmp_path / "new" / "bench.json"
    from benchmarks.__main__ import FAMILIES, GROUPS, TORCH_FAMILIES

    # tests/project/test_proofs.py runs the proofs, whose rows depend on the data that are there.
    families = dict(FAMILIES) | dict(TORCH_FAMILIES) | dict.fromkeys(GPU_TARGETS)
    names = [name for name in families if name not in GROUPS["proofs"]]
    command = [sys.executable, "-m", "benchmarks", *names, "--quick", "--output", str(output)]
    environment = {**os.environ, "TMPDIR": str(scratch), "TAGI_DDP_UCI_DATA": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == KEYS
        assert "cores" in row["machine"]
        assert "pytagi 0.2.1" in row["machine"]
        assert row["name"] in done.stdout
        if row["missing"]:
            assert all(re.search(MAY_LACK, reason) for reason in row["missing"])
            assert all(reason in done.stdout for reason in row["missing"])
            continue
        assert math.isfinite(row["ours"])
        better = row["other"] / row["ours"]
        if row["unit"].endswith("/s"):
            better = 1 / better
        assert row["ratio"] == pytest.approx(better)
    lacking = {row["name"].partition(",")[0] for row in rows if row["missing"]}
    targets = [row["target"] for row in rows]
    compute = [15, 1 / 3] * 2 + [20, 1 / 3] * 4 + [None, 1 / 3] * 2
    small: list[float | None] = [2, 5, 2, None, 1, 1, 0.95]
    small += [1, None, 1, 1]  # on two ranks
    pauses: list[float | None] = [1, 1, 1, None, None] * 2
    elastic: list[float | None] = [*[1, 1, 1, None] * 2, 1]
    estimators: list[float | None] = [1] * 10
    scaling, memory, overlap = [1.8, None] * 2, [0.25] * 2, [None] * 2
    nodes: list[float | None] = [1 / 0.66, None, None, None, None, None, None, 100]
    hosts: list[float | None] = [1 / 1.1, None, 1 / 1.05, None] * 2
    plan: list[float | None] = [*[None] * 6, 1, 1]
    cars: list[float | None] = [1 / 1.05] * 4
    images: list[float | None] = [*[1 / 1.05] * 4, *[None] * 4]
    merges: list[float | None] = [None] * (3 + 3 + 7 * 3)  # MLP, CNN, rules for shards
    assert targets == [
        *(60, 2.5, *[None] * 8, 1.2, 1.9, *compute, *small, *pauses, *elastic, None, *estimators),
        *(*scaling, *memory, *overlap, 2, 2, 2, 2, 1.5, 1, 1.5, 1.5, 1.5),
        *([None, None] if "2 emulated nodes" in lacking else [*nodes, *hosts]),
        *[None] * 4,  # start
        *([None] * 6 if "predicted steps" in lacking else plan),
        *([None, *images] if "calibration" in lacking else [*images, *cars]),
        *(*merges, *ALL_GPU_TARGETS),
    ]
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_batches_are_compared(tmp_path: Path) -> None:
    output = tmp_path / "settings.json"
    command = [sys.executable, "-m", "benchmarks.settings", "--epochs", "1", "--sets", "diabetes"]
    printed = subprocess.check_output(
        [*command, "--output", str(output)], cwd=ROOT, text=True, timeout=100
    )
    runs = json.loads(output.read_text())
    assert len(runs) == 5 * 3 * 6  # networks, noises, batches
    assert f"bad runs, of {len(runs)}\n" in printed
    assert all(0.5 < run["error"] < 5 for run in runs)


@pytest.mark.slow
def test_the_speed_up_is_plotted(tmp_path: Path) -> None:
    plot = tmp_path / "speed_up.png"
    module = ["-m", "benchmarks.families.scaling", "--quick", "--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, *module], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for network in ("MLP", "CNN"):
        for ranks in (1, 2, 4):
            assert f"{network}, batch 4, ranks: {ranks}: " in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_failing_family_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import __main__ as program
    from benchmarks.harness.measure import Figure, Row

    def measure(families: Sequence[str], ranks: int, quick: bool) -> dict[str, list[Row]]:
        [family] = families
        if family == "training":
            raise SystemExit("failed")
        return {family: [Row(f"{family} {ranks}", Figure(1, 1, 1), Figure(2, 2, 2), "ms", None)]}

    monkeypatch.setattr(program, "measure_families", measure)
    output = tmp_path / "bench.json"
    command = ["benchmarks", "training", "all_reduce", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="failed"):
        program.main()
    found = [row["name"] for row in json.loads(output.read_text())]
    assert found == ["all_reduce 2", "all_reduce 4"]
    assert "all_reduce 4" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nonsense"])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert "no family nonsense; there are steps, all_reduce" in capsys.readouterr().err


def test_without_mpi_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.harness import launch, report

    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "find_open_mpi", lambda: None)
    measured = launch.measure_families(["steps", "all_reduce"], 2, quick=True)
    rows = [*measured["steps"], *measured["all_reduce"]]
    output = tmp_path / "bench.json"
    report.print_table(rows)
    report.write_json(rows, "a machine", output)
    found = json.loads(output.read_text())
    for row in found:
        if "mpi4py" in row["name"]:
            assert row["missing"] == ["Open MPI's mpirun is not installed"]
        elif "gloo" in row["name"]:
            assert set(row["missing"]) == {"torch is not installed"}
            if "over gloo" in row["name"]:
                assert row["ours"] is None
                continue
        else:
            assert row["ratio"] > 0
            continue
        assert row["other"] is None
        assert row["ratio"] is None
        assert row["ours"] > 0
    assert {"mpi4py", "gloo", "process"} <= {w for row in found for w in row["name"].split()}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.slow
def test_rows_of_gpus(
    devices: int, stand_in: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stand-ins, and nobody takes their figures for those of GPUs."""
    from benchmarks.harness import launch
    from benchmarks.harness.measure import Figure, Missing

    faults = "ncclGetVersion:value=23001"
    for name, value in {**stand_in, "TAGI_DDP_STAND_IN_FAULT": faults}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TAGI_DDP_STAND_IN_DEVICES", str(devices))
    found = launch.measure_families(["gpu_calls", "gpu_exchange"], 2, quick=True)
    found |= launch.measure_families(["gpu_steps"], 1, quick=True)
    assert {name: [row.target for row in rows] for name, rows in found.items()} == GPU_TARGETS
    for row in found["gpu_calls"] + found["gpu_exchange"]:
        assert f"2 ranks on {devices} x stand-in" in row.name
    for row in found["gpu_calls"]:
        assert isinstance(row.ours, Figure)
        assert row.other == Missing("torch has no NCCL here")
    steps, *captured, bare = found["gpu_steps"]
    for row in (*captured, bare):
        assert isinstance(row.ours, Missing)
        assert "the network is on cpu, not on a GPU" in row.ours.reason
    assert all(isinstance(row.other, Figure) for row in captured)
    assert all("stand-in" in row.name for row in found["gpu_steps"])
    assert all(row.ratio for row in (steps, *found["gpu_exchange"]))


@pytest.mark.slow
def test_ranks_that_cannot_share_a_gpu(
    stand_in: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.harness import launch
    from benchmarks.harness.measure import Missing

    for name, value in {**stand_in, "TAGI_DDP_STAND_IN_DEVICES": "1"}.items():
        monkeypatch.setenv(name, value)
    found = launch.measure_families(["gpu_calls", "gpu_exchange"], 2, quick=True)
    for row in [row for rows in found.values() for row in rows]:
        assert isinstance(row.ours, Missing)
        assert "2.30" in row.other.reason
        assert row.ratio is None


@pytest.mark.parametrize("ends", [True, False])
def test_ranks_are_at_once_on_a_gpu(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program that stands in for MPS's; a daemon that cannot begin changes nothing."""
    from benchmarks.harness.gpus import at_once_on_a_gpu

    variable, program = "CUDA_MPS_PIPE_DIRECTORY", tmp_path / "nvidia-cuda-mps-control"
    wait = 'mkfifo "$folder/control"; read -r line < "$folder/control"; exit 0'
    daemon = wait if ends else "exit 1"
    program.write_text(
        f'#!/bin/sh\nfolder="${variable}"\n'
        f'if [ "$1" = -f ]; then {daemon}; fi\ncat > "$folder/control"\n'
    )
    program.chmod(0o755)
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with at_once_on_a_gpu():
        folder = os.environ.get(variable)
        assert (folder is not None) == ends
        if folder:
            with at_once_on_a_gpu():  # as for a user who has started MPS
                assert os.environ[variable] == folder
            assert os.environ[variable] == folder
    assert variable not in os.environ
    assert folder is None or not Path(folder).exists()
    assert children.read_text() == before


def test_failure_of_a_rank_is_told(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.harness import launch

    monkeypatch.setenv("TMPDIR", str(scratch))
    with pytest.raises(SystemExit, match="benchmark nonsense on 2 ranks: failed with status"):
        launch.measure_families(["nonsense"], 2, quick=True)
    assert "No module named 'benchmarks.families.nonsense'" in capfd.readouterr().err
    assert not list(scratch.iterdir())


def test_each_round_samples_all() -> None:
    from benchmarks.harness.measure import Contender, measure

    calls: list[str] = []
    contenders = [
        Contender("a", lambda: calls.append("a"), lambda: calls.append("before a"), calls=2),
        Contender("b", lambda: calls.append("b"), alone=True),
    ]
    with init(rank=0, world_size=1) as communicator:
        figures = measure(communicator, contenders, rounds=3)
    orders = {"before a,a,a,b", "b,before a,a,a"}
    rounds = [",".join(calls[begin : begin + 4]) for begin in range(0, len(calls), 4)]
    assert len(rounds) == 4
    assert set(rounds) == orders
    assert list(figures) == ["a", "b"]
    assert all(0 < f.low <= f.median <= f.high for f in figures.values())


def test_only_rank_0_works_alone() -> None:
    from tagi_ddp import launch

    def count() -> int:
        sys.path.insert(0, os.fspath(ROOT))
        from benchmarks.harness.measure import Contender, measure

        calls: list[int] = []
        with init("shm") as communicator:
            measure(communicator, [Contender("a", lambda: calls.append(0), alone=True)], rounds=1)
        return len(calls)

    assert launch(count, 2, timeout=60) == [2, 0]
