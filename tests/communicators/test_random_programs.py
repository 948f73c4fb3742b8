"""Random programs of messages and collectives, whose order differs between ranks, against numpy.

Ranks are on one host and on several, which are emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from contract.data import DTYPES
from contract.programs import COUNTS, KINDS, Step, run_program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rank_pool import RankPool

# Of each rank a letter, its host's. "flat": ranks do not use the memory of their hosts.
PLACES = [("shm", "aaa"), ("gloo", "ab"), ("gloo", "aab"), ("mpi", "ab")]
MORE_PLACES = [
    *((backend, place) for backend in ("gloo", "mpi") for place in ("aaa", "aba", "aabb", "abcc")),
    ("gloo", "aab flat"),
    ("mpi", "aab"),
    ("mpi", "aab flat"),
]
FEW, MANY = 15, 300
STEPS = st.tuples(
    st.sampled_from(["message"] * 4 + KINDS),
    st.sampled_from(DTYPES),
    st.integers(0, 11),
    st.lists(COUNTS, min_size=4, max_size=4),
    st.booleans(),
)


def with_limit(comm: Any, steps: list[Step], most: int) -> list[bytes]:
    """Run the steps where MPI takes so many elements at a time."""
    if comm.backend == "mpi":
        from tagi_ddp.communicators.network import mpi

        mpi._MOST = most
    return run_program(comm, steps)


@pytest.fixture(
    scope="module",
    params=[*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in MORE_PLACES)],
    ids="-".join,
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    backend, where = request.param
    place, *flat = where.split()
    environment = {"TAGI_DDP_TWO_LEVELS": "0" if flat else "1"}
    if backend != "shm":
        environment["RANK_POOL_HOSTS"] = place
    pool = RankPool(backend, len(place), environment=environment)
    yield pool
    pool.close()


def check(pool: RankPool, programs: int) -> None:
    @settings(max_examples=programs, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        steps=st.lists(STEPS, min_size=2, max_size=12),
        most=st.sampled_from([(1 << 31) - 1, 5000, 100]),
    )
    def run(steps: list[Step], most: int) -> None:
        results = pool.run(with_limit, steps, most)
        assert all(result == results[0] for result in results), "results differ in bits"

    run()


def test_messages_among_collectives(pool: RankPool) -> None:
    check(pool, FEW)


@pytest.mark.slow
def test_many_programs(pool: RankPool) -> None:
    check(pool, MANY)
