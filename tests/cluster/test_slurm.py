"""srun, sbatch and scancel on two nodes of a real SLURM, emulated on this machine."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.slurm import LIMIT, Slurm, cluster, missing
from support.pages import ROOT, blocks
from support.resumes import RESUMES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is all"),
]

TRAIN = """
import os, signal, sys, time
import numpy as np
from tagi_ddp import init

with init(timeout=20) as comm:
    total = np.full(1000, comm.rank + 1.0)
    comm.all_reduce(total)
    said = f"{comm.rank} of {comm.size} {comm.backend} {total[0]:g}"
    print(said + " on " + os.environ["SLURMD_NODENAME"], flush=True)
    while "forever" in sys.argv:
        comm.all_reduce(total)
        if "die" in sys.argv and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def expected(backend: str) -> list[str]:
    nodes = ["one", "one", "two", "two"]
    return [f"{rank} of 4 {backend} 10 on {node}" for rank, node in enumerate(nodes)]


def test_srun_brings_gloo(slurm: Slurm, script: Path) -> None:
    pytest.importorskip("torch")
    done = slurm.run("srun", "-N", "2", "--ntasks-per-node=2", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == expected("gloo")
    assert done.stderr == ""


def test_srun_with_pmix_brings_mpi(slurm: Slurm, script: Path) -> None:
    pytest.importorskip("mpi4py")
    if "pmix" not in (known := slurm.run("srun", "--mpi=list")).stdout + known.stderr:
        pytest.skip("SLURM has no PMIx")
    done = slurm.run("srun", "--mpi=pmix", "-N", "2", "--ntasks-per-node=2", sys.executable, script)
    if "can not load PMIx library" in done.stderr:
        pytest.skip("SLURM finds no libpmix.so.2: Debian's libpmix-dev has it")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == expected("mpi")


def test_ranks_of_one_node_have_shared_memory(slurm: Slurm, script: Path) -> None:
    done = slurm.run("srun", "-N", "1", "-n", "2", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert [line[:12] for line in sorted(done.stdout.splitlines())] == [
        "0 of 2 shm 3",
        "1 of 2 shm 3",
    ]


def test_sbatch(slurm: Slurm, script: Path) -> None:
    pytest.importorskip("torch")
    batch, output = script.with_name("job.sh"), script.with_name("output")
    batch.write_text(f"#!/bin/sh\nsrun {sys.executable} {script}\n")
    done = slurm.run(
        "sbatch", "--wait", "-N", "2", "--ntasks-per-node=2", f"--output={output}", batch
    )
    assert done.returncode == 0, output.read_text()
    assert sorted(output.read_text().splitlines()) == expected("gloo")


def test_the_job_of_the_page(slurm: Slurm, tmp_path: Path) -> None:
    """It begins again at its checkpoint after a rank has died."""
    pytest.importorskip("torch")
    (job,) = (b.text for b in blocks(ROOT / "docs" / "clusters.md") if "#SBATCH" in b.text)
    (tmp_path / "train.py").write_text(RESUMES)
    secret = tmp_path / ".tagi_ddp_secret"
    secret.write_text(slurm.environment["TAGI_DDP_SECRET"])
    secret.chmod(0o600)
    script = f"{sys.executable} {tmp_path / 'train.py'} {tmp_path / 'checkpoints'} 0:5"
    for name, value in {"$HOME": str(tmp_path), ".venv/bin/python script.py": script}.items():
        assert job.count(name) == 1
        job = job.replace(name, value)
    (tmp_path / "job.sh").write_text(job)
    output = tmp_path / "output"
    done = slurm.run("sbatch", "--ntasks-per-node=2", f"--output={output}", tmp_path / "job.sh")
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 5 * LIMIT
    while not output.exists() or "hash" not in output.read_text():
        assert time.monotonic() < deadline, output.read_text() if output.exists() else "no output"
        time.sleep(0.5)
    starts = [line for line in output.read_text().splitlines() if line.startswith("from")]
    assert starts == ["from 0", "from 3"]


def test_an_interactive_shell_starts_one_process(slurm: Slurm) -> None:
    """And not one of the ranks that SLURM's variables tell of; but a task on a terminal is one."""
    code = "from tagi_ddp.environment import detect; print(detect().launcher, end=chr(59))"
    python = shlex.join([sys.executable, "-c", code])
    for task, launcher in (
        (f"bash --norc -ic {shlex.quote(python + '; true')}", "none"),
        (python, "slurm"),
    ):
        command = f"srun -N 1 -n 2 --pty {task}"
        done = slurm.run("script", "-qec", command, "/dev/null")
        assert f"{launcher};" in done.stdout, done.stdout


def test_a_killed_rank_ends_all_by_name(slurm: Slurm, script: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, script, "forever", "die"]
    done = slurm.run("srun", "-N", "2", "--ntasks-per-node=2", "--kill-on-bad-exit=0", *command)
    assert done.returncode != 0
    lost = [line for line in done.stderr.splitlines() if "errors.PeerLost: " in line]
    assert len(lost) == 3
    assert all("(gloo): rank 1 died" in line for line in lost)


def test_scancel_leaves_nothing(slurm: Slurm, script: Path) -> None:
    pytest.importorskip("torch")
    tasks = ["srun", "-N", "2", "--ntasks-per-node=2"]
    with slurm.start(*tasks, sys.executable, script, "forever") as job:
        assert job.stdout is not None
        for _ in range(4):
            assert " of 4 " in job.stdout.readline()
        slurm.run("scancel", "--user=root")
        assert job.wait(LIMIT) != 0
    end = time.monotonic() + LIMIT
    while (left := processes_of(script)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def processes_of(script: Path) -> list[str]:
    """Return the command lines that name ``script``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
        if str(script) in line:
            found.append(line)
    return found


def test_our_launcher_does_not_train_side_by_side(slurm: Slurm, script: Path) -> None:
    ours = [sys.executable, "-m", "tagi_ddp", "run", "-n", "2"]
    done = slurm.run("srun", "-N", "1", "-n", "2", *ours, script)
    assert done.returncode == 2
    assert "this is task 1 of 2 that slurm has started" in done.stderr
    assert done.stdout == ""
    done = slurm.run("srun", "-N", "1", "-n", "1", *ours, script)
    assert done.returncode == 0, done.stderr
    assert "[0] 0 of 2 shm 3 on " in done.stdout
