"""The pools of processes that the tests of communicators share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("contract")

from support.rank_pool import Nursery, RankPool, doomed_pool  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs at the largest number of ranks only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a contract at the numbers of ranks that its class names."""
    if "size" in metafunc.fixturenames and metafunc.cls is not None:
        slow = metafunc.definition.get_closest_marker("slow") is not None
        metafunc.parametrize("size", metafunc.cls.sizes[-1:] if slow else metafunc.cls.sizes)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[tuple[Any, ...], RankPool]]:
    """The running pools; at the end no process and no shared memory is left."""
    before = shared_memory()
    running: dict[tuple[Any, ...], RankPool] = {}
    yield running
    for pool in running.values():
        pool.close()
    Nursery.close_shared()
    deadline = time.monotonic() + 10
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("*tagi*") if not path.is_dir()}


@pytest.fixture
def pool(
    request: pytest.FixtureRequest, pools: dict[tuple[Any, ...], RankPool], size: int
) -> RankPool:
    """The processes of the test's backend: MPI's worlds are of one size, the others' of any."""
    backend = request.cls.backend
    most = size if backend == "mpi" else max(request.cls.sizes)
    environment = environment_of(request)
    key = (backend, most, *environment.values())
    if key not in pools:
        pools[key] = RankPool(backend, most, environment=environment)
    return pools[key]


def environment_of(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the variables of the ranks of the test's backend."""
    if request.cls.backend != "nccl":
        hosts = getattr(request.cls, "hosts", "")  # of each rank a letter, its host's
        levels = getattr(request.cls, "levels", "")
        variables = {"RANK_POOL_HOSTS": hosts, "TAGI_DDP_TWO_LEVELS": levels}
        return {name: value for name, value in variables.items() if value}
    environment: dict[str, str] = request.getfixturevalue("stand_in")
    return environment


@pytest.fixture
def doomed(
    request: pytest.FixtureRequest, pools: dict[tuple[Any, ...], RankPool], size: int
) -> Iterator[RankPool]:
    """Processes of this test alone, which may die."""
    with doomed_pool(request.cls.backend, size, environment=environment_of(request)) as pool:
        yield pool
