"""Launchers that do not tell all: MPI and torch's group do, or a warning says so."""

import os
import subprocess
import sys

import pytest
from test_environment import SBATCH_BODY, SRUN, openmpi

SUMS = """
import sys, numpy as np, tagi_ddp
from tagi_ddp import DDPConfig, DistributedSampler
config = DDPConfig.from_env(sys.argv[1])
with tagi_ddp.init(sys.argv[1], timeout=30) as comm:
    total = np.array([1.0 + comm.rank])
    comm.all_reduce(total)
    found = [comm.rank, comm.size, comm.backend, total[0], config.rank, config.world_size]
print(*found, end="\\n", flush=True)
"""


def run_sums(backend, *, command=(), **variables):
    names = ("TAGI_DDP_", "OMPI_", "PMIX_", "SLURM_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    return subprocess.run(
        [*command, sys.executable, "-c", SUMS, backend],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_mpi_tells_its_ranks_where_the_launcher_does_not():
    """Open MPI's mpirun, without its variables, stands for launchers that are not known."""
    mpirun = openmpi()[:-1]
    unset = ["env", "-u", "OMPI_COMM_WORLD_RANK"]
    done = run_sums("mpi", command=[*mpirun, *unset])
    assert sorted(done.stdout.splitlines()) == ["0 2 mpi 3.0 0 2", "1 2 mpi 3.0 1 2"]
    assert "RuntimeWarning" not in done.stderr
    done = run_sums("auto", command=[*mpirun, *unset])
    assert done.stdout.splitlines() == ["0 1 single 1.0 0 1"] * 2
    for rank in range(2):  # each says it once
        assert done.stderr.count(f"PMIX_RANK={rank}, but no variable has the number of ranks") == 1
    assert 'Use the backend "mpi", which asks MPI' in done.stderr


def test_ranks_without_the_name_of_a_job_meet_by_mpi():
    """MVAPICH's variables, set by hand under another MPI: shared memory needs a name."""
    script = "RANK=$OMPI_COMM_WORLD_RANK; unset OMPI_COMM_WORLD_RANK; exec env "
    script += " ".join(
        f"MV2_COMM_WORLD_{name}={value}"
        for name, value in {
            "RANK": "$RANK",
            "SIZE": 2,
            "LOCAL_RANK": "$RANK",
            "LOCAL_SIZE": 2,
        }.items()
    )
    done = run_sums("auto", command=[*openmpi()[:-1], "sh", "-c", f'{script} "$@"', "sh"])
    assert sorted(done.stdout.splitlines()) == ["0 2 mpi 3.0 0 2", "1 2 mpi 3.0 1 2"]


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, False),
        ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "0"}, True),
        ({"PMI_RANK": "1"}, True),
        ({"PMIX_RANK": "0", "TAGI_DDP_RANK": "0", "TAGI_DDP_WORLD_SIZE": "1"}, False),
        ({"PMIX_RANK": "0", **SBATCH_BODY, "SLURM_STEP_ID": str(0xFFFFFFFA)}, False),
    ],
)
def test_a_launcher_that_is_not_known_warns(variables, warns):
    own = {"TAGI_DDP_LOCAL_RANK": "0", "TAGI_DDP_LOCAL_WORLD_SIZE": "1"}
    more = own if "TAGI_DDP_RANK" in variables else {}
    done = run_sums("auto", **variables, **more)
    assert done.stdout.split() == ["0", "1", "single", "1.0", "0", "1"]
    assert ("this process counts as one alone" in done.stderr) == warns


# Starts a task on a terminal of its own, as `srun --pty` does.
TASK = """
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.environ["SLURM_TASK_PID"] = str(os.getpid())
    os.execvp(sys.argv[1], sys.argv[1:])
text = b""
while True:
    try:
        data = os.read(terminal, 4096)
    except OSError:
        break
    if not data:
        break
    text += data
sys.stdout.buffer.write(text)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
DETECT = "from tagi_ddp.environment import detect; print('found', detect().launcher, end=';')"


@pytest.mark.parametrize(
    ("task", "launcher"),
    [
        (["python", "show.py"], "slurm"),  # srun --pty -n 2 python script.py
        (["sh", "-c", "python show.py; true"], "slurm"),  # a script around it
        (["bash", "--norc", "-ic", "python show.py; true"], "none"),
        # A notebook's kernel: in a session of its own.
        (["bash", "--norc", "-ic", "sh -c 'setsid -w python show.py'; true"], "none"),
        (["python", "-c", "import sys; sys.ps1 = '>>> '; import show"], "none"),
    ],
    ids=["rank", "script", "shell", "kernel", "prompt"],
)
def test_what_an_interactive_shell_starts_is_one_process(tmp_path, task, launcher):
    (tmp_path / "show.py").write_text(DETECT)
    variables = {**SRUN, "SLURM_PTY_PORT": "1"}
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, **variables, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", TASK, *task],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"found {launcher};" in done.stdout


SPAWNED = """
import sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp

def rank(number, folder):
    import tagi_ddp
    from tagi_ddp import DDPConfig, DistributedSampler, log
    dist.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=2)
    found = [len(list(DistributedSampler(8)))]
    for call in (tagi_ddp.init, DDPConfig.from_env):
        try:
            call()
        except ValueError as error:
            found.append("communicator=torch.distributed.group.WORLD" in str(error))
    found.append(tagi_ddp.init(rank=0, world_size=1).size)
    log("rank", number, found)
    dist.barrier()
    if number == 1:
        log("rank", number, found, rank=0)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), nprocs=2)
"""


def test_ranks_that_torch_has_spawned(tmp_path):
    """Progress bars and logs ask torch's group; a communicator must be told of it."""
    pytest.importorskip("torch")
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    expected = [f"rank {rank} [4, True, True, 1]" for rank in range(2)]
    assert done.stdout.splitlines() == expected
