"""Two levels: the ranks of a node, and the ranks on its other level."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from support.rank_pool import RankPool

from tagi_ddp.communicators.levels import Levels
from tagi_ddp.communicators.single import SingleCommunicator


def members(comm: Any, node_size: int) -> tuple[list[int], list[int], str]:
    levels = Levels(comm, node_size)
    found = []
    for level in (levels.node, levels.inter_node):
        ranks = np.empty(level.size, np.int64)
        level.all_gather(np.array([comm.rank]), ranks)
        found.append(ranks.tolist())
    assert levels.nodes == len(found[1])
    backend = levels.node.backend
    levels.close()
    comm.barrier()  # is still open
    return found[0], found[1], backend


@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_nodes_of_a_size(shm: RankPool, node_size: int) -> None:
    for rank, (node, inter_node, _) in enumerate(shm.run(members, node_size, size=4)):
        first = rank - rank % node_size
        assert node == list(range(first, first + node_size))
        assert inter_node == list(range(rank % node_size, 4, node_size))


def of_two_levels(comm: Any) -> tuple[bool, bool]:
    """Return whether nodes that are the hosts are the levels of a communicator, and other nodes."""
    found = []
    for node_size in (None, 1):
        levels = Levels(comm, node_size)
        found.append((levels.node, levels.inter_node) == (comm.node, comm.inter_node))
        total = np.ones(3)
        levels.inter_node.all_reduce(total)
        assert total[0] == levels.nodes
        levels.close()
        comm.barrier()
    return found[0], found[1]


def test_levels_are_made_once() -> None:
    environment = {"RANK_POOL_HOSTS": "aabb"}
    with contextlib.closing(RankPool("gloo", 4, environment=environment)) as pool:
        assert pool.run(of_two_levels) == [(True, False)] * 4


def create_levels(comm: Any, sizes: list[Any]) -> tuple[str, str]:
    try:
        Levels(comm, sizes[comm.rank])
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("sizes", "kind", "text"),
    [
        ([2, 2, 2], "ValueError", "node_size is 2, but 3 ranks do not make equal nodes"),
        ([0, 0, 0], "ValueError", "node_size must be at least 1, got 0"),
        ([1, 3, 1], "ValueError", "node_size differs between ranks: [1, 3, 1]"),
        (["2"] * 3, "TypeError", "node_size must be an integer, got '2'"),
    ],
)
def test_all_ranks_refuse(shm: RankPool, sizes: list[Any], kind: str, text: str) -> None:
    for found, message in shm.run(create_levels, sizes, size=3):
        assert found == kind
        assert text in message


def test_a_world_of_one() -> None:
    levels = Levels(SingleCommunicator())
    assert (levels.node.size, levels.inter_node.size, levels.nodes) == (1, 1, 1)
    levels.close()
