"""Sorting edges by the chunk of nodes that they end in, against anemoi-models; see `rows`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.measure import Contender, Missing, Row, measure
from benchmarks.harness.peers import find_anemoi
from tagi_ddp import Communicator
from tagi_ddp.sharding.khop_edges import sort_edges_1hop_chunks

TARGET = 2
CHUNKS = 16
ATTRIBUTES = 8  # an edge


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """Random edges into chunks, of one graph and between two, by as many threads as cores."""
    edges, nodes, rounds = (1000, 100, 1) if quick else (1_000_000, 100_000, 31)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    theirs = find_anemoi()
    if not isinstance(theirs, Missing):
        sort = importlib.import_module(f"{theirs.__name__}.khop_edges").sort_edges_1hop_chunks
    found = []
    for kind, count in (("one graph", nodes), ("bipartite", (nodes, nodes))):
        index, attr = torch.randint(nodes, (2, edges)), torch.randn(edges, ATTRIBUTES)
        arguments = (count, attr, index, CHUNKS)
        contenders = [Contender("ours", lambda given=arguments: sort_edges_1hop_chunks(*given))]
        if not isinstance(theirs, Missing):
            _require_same(sort_edges_1hop_chunks(*arguments), sort(*arguments))
            contenders.append(Contender("theirs", lambda given=arguments: sort(*given)))
        figures = {
            name: figure.in_unit(1e3)
            for name, figure in measure(communicator, contenders, rounds).items()
        }
        name = f"sort {edges} edges into {CHUNKS} chunks, {kind}, against anemoi-models"
        other = theirs if isinstance(theirs, Missing) else figures["theirs"]
        found.append(Row(name, figures["ours"], other, "ms", TARGET))
    return found


def _require_same(
    ours: tuple[list[Tensor], list[Tensor]], theirs: tuple[list[Tensor], list[Tensor]]
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if not all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)):
            raise RuntimeError("ours and anemoi-models' chunks differ")
