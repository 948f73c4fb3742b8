"""Two levels: who is on a node, and whom its ranks meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.rank_pool import RankPool

from tagi_ddp.communicators import hierarchy as module
from tagi_ddp.communicators.hierarchy import Levels
from tagi_ddp.communicators.single import SingleCommunicator


def members(comm: Any, node_size: int) -> tuple[list[int], list[int], str]:
    levels = Levels(comm, node_size)
    found = []
    for level in (levels.node, levels.across):
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
    for rank, (node, across, _) in enumerate(shm.run(members, node_size, size=4)):
        first = rank - rank % node_size
        assert node == list(range(first, first + node_size))
        assert across == list(range(rank % node_size, 4, node_size))


def test_a_node_of_a_network_uses_memory(gloo: RankPool) -> None:
    assert [backend for *_, backend in gloo.run(members, 2, size=2)] == ["shm", "shm"]


def refused(comm: Any, sizes: list[Any]) -> tuple[str, str]:
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
    for found, message in shm.run(refused, sizes, size=3):
        assert found == kind
        assert text in message


def place(host: str, launched: int = 0) -> module._Place:
    return module._Place(host, None, launched, "")


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        ([place("a"), place("a")], [0, 0]),
        ([place("a"), place("b"), place("a"), place("b")], [0, 1, 0, 1]),  # round robin
        ([place("a", 2), place("a", 2), place("b", 2), place("b", 2)], [0, 0, 1, 1]),
        ([place("a", 2)] * 4, [0, 0, 1, 1]),  # two containers of one name
        ([place("a", 1), place("b", 1), place("a", 1)], [0, 1, 2]),
    ],
)
def test_nodes_without_a_size(places: list[module._Place], nodes: list[int]) -> None:
    assert module._nodes(places) == nodes


def test_unequal_hosts() -> None:
    for launched in (0, 2):
        with pytest.raises(ValueError, match=r"unequal numbers of ranks, \{'a': 2, 'b': 1\}"):
            module._nodes([place("a", launched), place("a"), place("b")])


def test_a_world_of_one() -> None:
    levels = Levels(SingleCommunicator())
    assert (levels.node.size, levels.across.size, levels.nodes) == (1, 1, 1)
    levels.close()
