"""The pools of ranks that tests share: `shm`, `gloo`, `mpi`, `nccl` and `gpu`."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator

import hypothesis
import pytest
from support.devices import Devices
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


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> RankPool:
    """The pool that the test's parameter names: ``parametrize("pool", ["shm"], indirect=True)``."""
    named: RankPool = request.getfixturevalue(request.param)
    return named


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


@pytest.fixture(scope="module")
def pool_on_gpus() -> Iterator[Callable[[int], RankPool]]:
    """A function that returns so many ranks on GPUs, over NCCL's own library, or skips the test."""
    from support.on_device import gpus, why_not  # which loads torch

    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        if reason := why_not(size):
            pytest.skip(reason)
        if size not in pools:
            pools[size] = RankPool("nccl", size, **gpus(size))
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()


ON_GPUS = [pytest.param(size, marks=pytest.mark.gpu, id=f"gpu-{size}") for size in (1, 2)]


@pytest.fixture(scope="module", params=ON_GPUS)
def gpu(request: pytest.FixtureRequest, pool_on_gpus: Callable[[int], RankPool]) -> RankPool:
    """One or two ranks on GPUs, over NCCL's own library."""
    return pool_on_gpus(request.param)


@pytest.fixture(scope="module", params=["stand-in", *ON_GPUS])
def devices(request: pytest.FixtureRequest) -> Devices:
    """Up to four ranks over the stand-in for NCCL; one or two on GPUs."""
    if request.param == "stand-in":
        return Devices(request.getfixturevalue("nccl"), "cpu:0", 1e-5, stand_in=True)
    pool = request.getfixturevalue("pool_on_gpus")(request.param)
    return Devices(pool, None, 1e-4, stand_in=False)
