"""The ranks of each node, and the number of cores of each rank: plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rank_pool import RankPool

from tagi_ddp.communicators.topology import Location, Topology, topology_of


def located(host: str, local_rank: int = 0, local_size: int = 0) -> Location:
    return Location(f"id of {host}", (), False, local_rank, local_size, host)


A, B = located("a"), located("b")
PAIR = [located("a", 0, 2), located("a", 1, 2)]


@pytest.mark.parametrize(
    ("locations", "nodes"),
    [
        ([A, A], [[0, 1]]),
        ([A, B, A, B], [[0, 2], [1, 3]]),  # round robin
        ([*PAIR, located("b", 0, 2), located("b", 1, 2)], [[0, 1], [2, 3]]),
        (PAIR * 2, [[0, 1], [2, 3]]),  # two containers of one name
        ([located("a", 0, 1), located("b", 0, 1), located("a", 0, 1)], [[0], [1], [2]]),
    ],
)
def test_nodes_without_a_size(locations: list[Location], nodes: list[list[int]]) -> None:
    assert Topology(tuple(locations)).nodes() == nodes


@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.booleans())
def test_nodes_are_what_the_launcher_says_or_hosts(
    nodes: int, local: int, told: bool, one_name: bool
) -> None:
    size = local if told else 0
    blocks = [
        located("h" if one_name and told else f"h{n}", i if told else 0, size)
        for n in range(nodes)
        for i in range(local)
    ]
    expected = [list(range(n * local, (n + 1) * local)) for n in range(nodes)]
    assert Topology(tuple(blocks)).nodes() == expected
    assert Topology(tuple(blocks)).nodes(local) == expected


@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.randoms())
def test_shuffled_ranks_find_their_hosts(nodes: int, local: int, told: bool, random: Any) -> None:
    size = local if told else 0
    shuffled = [
        located(f"h{n}", i if told else 0, size) for n in range(nodes) for i in range(local)
    ]
    random.shuffle(shuffled)  # as a launcher does that goes round the nodes
    found = Topology(tuple(shuffled)).nodes()
    assert sorted(rank for ranks in found for rank in ranks) == list(range(len(shuffled)))
    assert {len(ranks) for ranks in found} == {local}
    blocks = [list(range(n * local, (n + 1) * local)) for n in range(nodes)]
    if found != blocks:
        for ranks in found:
            assert len({shuffled[rank].host for rank in ranks}) == 1


def test_unequal_hosts_are_refused() -> None:
    for first in (A, located("a", 0, 2)):
        with pytest.raises(ValueError, match="unequal numbers of ranks, 2 on a, 1 on b: start"):
            Topology((first, A, B)).nodes()


@pytest.mark.parametrize(
    ("cores", "bound", "expected"),
    [
        ([(0, 1), (0, 1)], False, 1),  # two cores for both
        ([(0, 1), (2, 3)], True, 2),
        ([(0, 1, 2, 3)], True, 4),
        ([(0,), (0,), (0,)], True, 1),
    ],
)
def test_a_ranks_share_of_the_cores(
    cores: list[tuple[int, ...]], bound: bool, expected: int
) -> None:
    topology = Topology(tuple(Location("a", own, bound) for own in cores))
    assert topology.share_of_cores(0) == expected


def gather_topology(comm: Any) -> tuple[bool, int, bool]:
    topology = topology_of(comm)
    return topology.one_host, len(topology.locations), topology_of(comm) is topology


def test_the_topology_is_gathered_once(shm: RankPool, gloo: RankPool) -> None:
    for pool in (shm, gloo):
        assert pool.run(gather_topology, size=2) == [(True, 2, True)] * 2
