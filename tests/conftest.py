"""The pool of processes that tests of whole models share."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
from support.rank_pool import OPEN_MPI_FILES, RankPool
from support.stand_in.build import build

# No test asserts a speed: an example may take its time on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A shell starts what it puts in the background with this signal ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files are tested side by side, and threads that spin while they wait take the cores from others.
# They read this when torch is loaded, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# torch asks for the name of every peer's address; a DNS that drops such a question costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


# Ranks that a launcher of others starts would warn that they have none.
os.environ["TAGI_DDP_SECRET"] = secrets.token_hex()


@pytest.fixture(scope="session", autouse=True)
def open_mpi_files() -> Iterator[None]:
    """Leave none of Open MPI's files behind."""
    with tempfile.TemporaryDirectory(prefix="tagi_ddp_tests.", dir="/dev/shm") as folder:
        os.environ[OPEN_MPI_FILES] = folder
        yield


@pytest.fixture(scope="session")
def shm() -> Iterator[RankPool]:
    """Up to four ranks over shared memory."""
    pool = RankPool("shm", 4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gloo() -> Iterator[RankPool]:
    """Up to three ranks over gloo."""
    pool = RankPool("gloo", 3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def mpi() -> Iterator[RankPool]:
    """Two ranks over MPI."""
    pool = RankPool("mpi", 2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables that make stand-ins take the place of NCCL and CUDA's driver."""
    sanitize = "libasan" in os.environ.get("LD_PRELOAD", "")
    nccl, cuda = build(tmp_path_factory.mktemp("stand_in"), sanitize=sanitize)
    return {"TAGI_DDP_LIBNCCL": str(nccl), "TAGI_DDP_LIBCUDA": str(cuda)}


@pytest.fixture(scope="session")
def nccl(stand_in: dict[str, str]) -> Iterator[RankPool]:
    """Up to four ranks over the stand-in for NCCL."""
    pool = RankPool("nccl", 4, environment=stand_in)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=[1, 2])
def gpu(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """One or two ranks on GPUs, over NCCL's own library."""
    from support.on_device import gpus, why_not  # which loads torch

    if reason := why_not(request.param):
        pytest.skip(reason)
    pool = RankPool("nccl", request.param, **gpus(request.param))
    yield pool
    pool.close()
