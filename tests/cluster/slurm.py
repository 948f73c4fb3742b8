"""A SLURM of two nodes on this machine, as root: its own munge, daemons, folders and ports."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.rank_pool import free_port, worker_environment

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "unshare")
LIMIT = 120.0  # sbatch --wait looks more and more seldom

CONFIGURATION = """\
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
TmpFS={folder}/tmp.%n
KillWait=2
SlurmdParameters=config_overrides
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=4 RealMemory=1000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=4 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP
"""


class Slurm:
    """Runs commands on the cluster."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **worker_environment({}),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "TAGI_DDP_SECRET": secrets.token_hex(),
        }

    def run(self, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    @contextlib.contextmanager
    def start(self, *command: str | Path) -> Iterator[subprocess.Popen[str]]:
        """Start a command, which is killed at the end of the block, or when its time is up."""
        words = [str(word) for word in command]
        with subprocess.Popen(
            words, env=self.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            limit = threading.Timer(LIMIT, process.kill)
            limit.start()
            try:
                yield process
            finally:
                limit.cancel()
                process.kill()


def missing() -> str:
    """Return what keeps this machine from having a cluster, or ""."""
    if os.geteuid() != 0:
        return "two slurmd need root"
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        return f"no {', '.join(absent)}: Debian's slurm-wlm has them"
    return ""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Start a cluster whose files lie in ``folder``; end it with all of its jobs."""
    for name in ("state", "spool.one", "spool.two", "tmp.one", "tmp.two"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=socket.gethostname(),
            folder=folder,
            port=free_port(),
            one=free_port(),
            two=free_port(),
        )
    )
    # The names of the nodes are known to their daemons and tasks only.
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 one two\n")
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "key").chmod(0o400)
    slurm = Slurm(folder)
    with contextlib.ExitStack() as stack:
        names = {"socket": "munge.socket", "key-file": "key", "pid-file": "munge.pid"}
        names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        _start(stack, slurm, folder, ["munged", "--foreground", "--force", *options])
        _start(stack, slurm, folder, ["slurmctld", "-D"])
        for node in ("one", "two"):
            script = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            _start(stack, slurm, folder, ["unshare", "--mount", "sh", "-c", script])
        stack.callback(_end_jobs, slurm)
        _await_idle(slurm, folder)
        yield slurm


def _start(stack: contextlib.ExitStack, slurm: Slurm, folder: Path, command: Sequence[str]) -> None:
    with open(folder / "daemons.log", "ab") as log:
        process = subprocess.Popen(
            command, env=slurm.environment, stdout=log, stderr=log, start_new_session=True
        )
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_idle(slurm: Slurm, folder: Path) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if slurm.run("sinfo", "--noheader", "--format=%T %D").stdout.strip() == "idle 2":
            return
        time.sleep(0.2)
    raise AssertionError(f"no cluster:\n{(folder / 'daemons.log').read_text()[-4000:]}")


def _end_jobs(slurm: Slurm) -> None:
    """Cancel what is left, so that no job outlives the daemons."""
    slurm.run("scancel", "--user=root")
    end = time.monotonic() + LIMIT
    while slurm.run("squeue", "--noheader").stdout.strip() and time.monotonic() < end:
        time.sleep(0.2)
