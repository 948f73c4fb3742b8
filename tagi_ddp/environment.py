"""The launcher of this process, its rank and world size, from the launcher's variables.

The first of these whose variables are set decides, the innermost launcher first:

1. ``tagi_ddp``: our own launcher (``TAGI_DDP_RANK``).
2. ``torchrun`` (``TORCHELASTIC_RUN_ID``), which is started by mpirun or srun and never starts them.
3. ``openmpi``: Open MPI's mpirun (``OMPI_COMM_WORLD_RANK``).
4. ``mvapich``: its mpirun_rsh (``MV2_COMM_WORLD_RANK``, since version 3 ``MVP_COMM_WORLD_RANK``).
5. ``mpich``: Hydra, of MPICH, Intel MPI and relatives (``PMI_RANK`` with ``MPI_LOCALRANKID``).
6. ``slurm``: a step of srun. The body of an sbatch script, an salloc shell, and commands that a
   user types on the terminal of ``srun --pty`` have ``SLURM_PROCID=0`` and the number of tasks,
   too, but are one process: they count as no launcher.
7. ``pmi``: other launchers of MPI, like PALS and Flux (``PMI_RANK`` and ``PMI_SIZE``).
8. ``torchrun`` again: RANK and WORLD_SIZE set by hand, LOCAL_RANK and LOCAL_WORLD_SIZE if they are
   known, as in a notebook or in the pods of a Kubernetes job.

``TAGI_DDP_JOB`` replaces the job key of any launcher. `job_secret` is the key that keeps other
users out.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

# SLURM numbers steps that srun did not start (batch, extern, interactive) from here.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0

# Ports for jobs that name none. Jobs that share a node should not share a port.
_FIRST_SLURM_PORT, _SLURM_PORTS = 20_000, 12_000

# The variables of rank, world size, local rank and local world size.
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OWN_NAMES = tuple(f"TAGI_DDP_{name}" for name in _TORCH_NAMES)
_OPENMPI_NAMES, *_MVAPICH_NAMES = (
    tuple(f"{launcher}_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    for launcher in ("OMPI", "MV2", "MVP")
)
_HYDRA_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMI_NAMES = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")

# Launchers whose ranks also get their numbers from MPI.
_OF_MPI = ("openmpi", "mvapich", "mpich", "pmi", "mpi")

# Variables of launchers that do not set the number of ranks, or set it in an unknown way.
_SIGNS = ("PMIX_RANK", "PMI_RANK", "PMI_ID", "PALS_RANKID", "MPIRUN_RANK", "JSM_NAMESPACE_RANK")


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's launcher, and its rank among the processes that were started together.

    ``job`` is the same on all ranks of a job and differs between jobs that one user runs at once on
    one host; any characters; None if the launcher has no such key.
    """

    launcher: str
    """One of the launchers above, "none", or "mpi" if the numbers are from MPI itself."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The number among the ranks of this host; ``rank`` if it is not known."""
    local_world_size: int = 1
    """The number of ranks of this host; 0 if it is not known."""
    job: str | None = None


def detect(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Return the launcher and rank of this process; without a launcher, rank 0 of 1.

    Raise ValueError that names the variable if the launcher's variables are malformed, incomplete
    or contradict each other. Warn if two launchers set different world sizes.
    """
    if "TAGI_DDP_RANK" in environ:
        return _read(environ, "tagi_ddp", _OWN_NAMES, None)
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        found = _torchrun(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ:
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        found = _read(environ, "openmpi", _OPENMPI_NAMES, job)
    elif names := next((names for names in _MVAPICH_NAMES if names[0] in environ), ()):
        found = _read(environ, "mvapich", names, None)
    elif "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ:
        found = _read(environ, "mpich", _HYDRA_NAMES, _hydra_job())
    elif (step := _slurm_step(environ)) == "ranks":
        found = _slurm(environ)
    elif step != "shell" and "PMI_RANK" in environ and "PMI_SIZE" in environ:
        job = environ.get("PMI_JOBID") or environ.get("PALS_APID") or environ.get("FLUX_JOB_ID")
        found = _read(environ, "pmi", _PMI_NAMES, job, whole=False)
    elif "RANK" in environ:
        found = _torchrun(environ, whole=False)
    else:
        return LaunchEnvironment("none")
    _warn_of_second_launcher(environ, found)
    return found


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.

    They are those of torch's default group if that is initialised, else the launcher's.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    environment = detect()
    return environment.rank, environment.world_size


def warn_if_not_alone(environment: LaunchEnvironment) -> None:
    """Warn (RuntimeWarning) if an unknown launcher has started this process in a world of one."""
    names = [name for name in _SIGNS if name in os.environ]
    if environment.launcher == "none" and names and not _slurm_step(os.environ):
        warnings.warn(
            f"{names[0]}={os.environ[names[0]]}, but no variable has the number of ranks: "
            'this process counts as one alone. Use the backend "mpi", which asks MPI, or set RANK '
            f"and WORLD_SIZE; unset {names[0]} if it is left over from another job",
            RuntimeWarning,
            stacklevel=1,  # It is shown once, for all callers.
        )


def offers_mpi(environment: LaunchEnvironment, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether MPI would get its ranks from the launcher.

    srun sets them only with ``--mpi=pmix`` or ``pmi2``; else each task is an MPI world of one.
    """
    if environment.launcher == "slurm":
        return "PMIX_RANK" in environ or "PMI_RANK" in environ
    return environment.launcher in _OF_MPI


# Variables that users or launchers set; docs/environment.md describes them.
_SETTINGS = (
    "BASE_SEED",
    "ENGINE_ACCESS",
    "JOB",
    "LIBCUDA",
    "LIBMPI",
    "LIBMPI_CXX",
    "LIBNCCL",
    "TERMINAL",
    "THREADS",
    "TORCH_CARRIER",
    "TRACE",
    "TWO_LEVELS",
)


def setting(name: str) -> str:
    """Return the variable TAGI_DDP_<name>; "" if it is not set."""
    if name not in _SETTINGS:
        raise KeyError(f"there is no TAGI_DDP_{name}")
    return os.environ.get(f"TAGI_DDP_{name}", "")


def two_levels() -> str:
    """Return TAGI_DDP_TWO_LEVELS: "0": ranks of a host share no memory; "1": two levels; or "".

    Raise ValueError for other values.
    """
    value = setting("TWO_LEVELS")
    if value not in ("", "0", "1"):
        raise ValueError(f'TAGI_DDP_TWO_LEVELS must be "0" or "1", got {value!r}')
    return value


def job_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the key by which the ranks of a job recognise each other; b"" if there is none.

    It is made of TAGI_DDP_SECRET, any text, which our launcher sets to a random one, or of the file
    that TAGI_DDP_SECRET_FILE names. Raise ValueError that names the variable if the file cannot be
    read, is empty, or is open to others than its owner.
    """
    text = environ.get("TAGI_DDP_SECRET", "").encode()
    name = environ.get("TAGI_DDP_SECRET_FILE")
    if not text and name:
        try:
            with open(name, "rb") as file:
                others = os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
                text = file.read().strip()
        except OSError as error:
            raise ValueError(f"TAGI_DDP_SECRET_FILE cannot be read: {error}") from error
        if others:
            raise ValueError(f"TAGI_DDP_SECRET_FILE is open to others: chmod 600 {name}")
        if not text:
            raise ValueError(f"TAGI_DDP_SECRET_FILE is empty: {name}")
    return hashlib.sha256(text).digest() if text else b""


def rendezvous_endpoint(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port of rank 0, where ranks without MPI find each other.

    They are MASTER_ADDR and MASTER_PORT, which torchrun and our launcher set; else, in a step of
    srun, the step's first node and a port computed from the job's number. Raise ValueError that
    names what is missing.
    """
    is_set = "MASTER_ADDR" in environ or "MASTER_PORT" in environ
    if not is_set and _slurm_step(environ) == "ranks":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        # Of "rack[3-5,9]-gpu,other", take the first of each bracket up to the comma outside.
        host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0].strip()
        job, step = environ.get("SLURM_JOB_ID", ""), environ["SLURM_STEP_ID"]
        if host and job.isdecimal():
            return host, _FIRST_SLURM_PORT + (7 * int(job) + int(step)) % _SLURM_PORTS
    address = environ.get("MASTER_ADDR")
    if not address:
        raise ValueError("MASTER_ADDR is not set")
    return address, _integer(environ, "MASTER_PORT", "MASTER_ADDR", 1, 1 << 16)


def warn_if_launcher_disagrees(
    environment: LaunchEnvironment, mpi_rank: int, mpi_size: int
) -> None:
    """Warn (RuntimeWarning) if MPI's world is not the one that the launcher started."""
    if (mpi_rank, mpi_size) == (environment.rank, environment.world_size):
        return
    warnings.warn(
        f"the launcher ({environment.launcher}) made this process rank {environment.rank} of "
        f"{environment.world_size}, but MPI says rank {mpi_rank} of {mpi_size}: mpi4py is probably "
        "bound to another MPI than the one whose mpirun started it. Use the mpirun that belongs to "
        "mpi4py's MPI (mpi4py.MPI.Get_library_version() names it), or another backend",
        RuntimeWarning,
        stacklevel=3,
    )


def warn_if_imported_mpi_disagrees(environment: LaunchEnvironment, backend: str) -> None:
    """Call `warn_if_launcher_disagrees` if mpi4py is loaded and started already; never load it.

    An MPI world of one is correct under a launcher that is none of MPI's, unless ``backend`` is
    "mpi".
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if size > 1 or backend == "mpi" or environment.launcher in _OF_MPI:
        warn_if_launcher_disagrees(environment, rank, size)


def _read(
    environ: Mapping[str, str],
    launcher: str,
    names: tuple[str, ...],
    job: str | None,
    whole: bool = True,
) -> LaunchEnvironment:
    """Read the four numbers from the variables of these names and check that they fit together.

    Unless ``whole``, the number of this host's ranks may be missing, and then the local rank, too.
    """
    rank, world_size, local_rank, local_world_size = names
    size = _integer(environ, world_size, launcher, 1)
    number = local = _integer(environ, rank, launcher, 0, size, world_size)
    local_size = 0
    if whole or local_world_size in environ:
        local_size = _integer(environ, local_world_size, launcher, 1, size + 1, world_size)
        local = _integer(environ, local_rank, launcher, 0, local_size, local_world_size)
    elif local_rank in environ:
        local = _integer(environ, local_rank, launcher, 0, size, world_size)
    return LaunchEnvironment(
        launcher,
        number,
        size,
        local,
        1 if size == 1 else local_size,
        environ.get("TAGI_DDP_JOB") or (job and f"{launcher}:{job}"),
    )


def _integer(
    environ: Mapping[str, str],
    name: str,
    launcher: str,
    low: int,
    end: int | None = None,
    limit: str = "",
) -> int:
    """Return the variable's value, which must be an integer in range(low, end)."""
    text = environ.get(name)
    if text is None:
        raise ValueError(
            f"{name} is not set but {launcher}'s other variables are: set or unset all"
        )
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise ValueError(f"{name} must be a non-negative integer, got {text!r}")
    value = int(text)
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if end is not None and value >= end:
        what = f"too much for {limit}={environ.get(limit)}" if limit else f"not below {end}"
        raise ValueError(f"{name} is {value}, {what}")
    return value


def _torchrun(environ: Mapping[str, str], whole: bool = True) -> LaunchEnvironment:
    # The port and the restart count distinguish two jobs with the same run id, which users choose.
    keys = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    parts = [environ[key] for key in keys if key in environ]
    return _read(environ, "torchrun", _TORCH_NAMES, "/".join(parts) or None, whole)


def _slurm_step(environ: Mapping[str, str]) -> str:
    """Return "ranks" in a step of srun, "shell" in one that runs a script or a shell, else ""."""
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not step.isdecimal():
        return ""
    return "shell" if int(step) >= _SLURM_SPECIAL_STEPS or _is_typed(environ) else "ranks"


def _is_typed(environ: Mapping[str, str]) -> bool:
    """Return whether a user of a terminal that ``srun --pty`` gives has started this process.

    A shell on a terminal makes a process group for each command; a script stays in that of SLURM's
    task. Python's prompt counts as typed, too. If a container renumbers processes, this process
    counts as a rank: to wait for other ranks in vain at least ends in an error.
    """
    if "SLURM_PTY_PORT" not in environ:
        return False
    try:
        task = os.getpgid(int(environ.get("SLURM_TASK_PID", "")))
    except (ValueError, OSError):
        return False
    return task != os.getpgrp() or hasattr(sys, "ps1")


def _slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    # The number of tasks of the step; older releases set only SLURM_NTASKS.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = _tasks_per_node(environ.get(name, ""), name)
    node = _integer(environ, "SLURM_NODEID", "slurm", 0, len(counts), name)
    job = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", name)
    return _read({**environ, name: str(counts[node])}, "slurm", names, job)


def _tasks_per_node(text: str, name: str) -> list[int]:
    """Expand SLURM's "2(x3),1" into [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if match is None:
            raise ValueError(f"{name} must be counts like '2(x3),1', got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _hydra_job() -> str | None:
    """Return a key of Hydra's proxy, an ancestor of this host's ranks; no variable has one."""
    pid = os.getpid()
    while pid > 1:
        try:
            # It is "pid (comm) state ppid ... starttime ..."; comm may hold spaces and brackets.
            before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:
            return None
        fields = after.split()
        if before.endswith("(hydra_pmi_proxy"):
            return f"{pid}/{fields[19]}"
        pid = int(fields[1])
    return None


def _warn_of_second_launcher(environ: Mapping[str, str], found: LaunchEnvironment) -> None:
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"):
        text = environ.get(name, "")
        if text.isdecimal() and int(text) != found.world_size:
            warnings.warn(
                f"{name}={text}, but {found.launcher} started {found.world_size} ranks, which is "
                f"what counts here. Unset {name}, or start the ranks with one launcher only",
                RuntimeWarning,
                stacklevel=3,
            )


def shows_bars(stream: TextIO | None) -> bool:
    """Return whether ``stream`` shows progress bars: it is a terminal, or in a notebook.

    TAGI_DDP_TERMINAL, 1 or 0, overrides this: our launcher sets it and forwards the output.
    """
    value = setting("TERMINAL")
    if value in ("0", "1"):
        return value == "1"
    isatty = getattr(stream, "isatty", bool)  # A tee may have only write and flush.
    return type(stream).__module__.startswith("ipykernel") or isatty()
