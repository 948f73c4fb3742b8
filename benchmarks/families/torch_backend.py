"""torch.distributed on the backend "tagi_ddp" against gloo; see `rows`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tagi_ddp.parallel  # noqa: F401  (registers the backend)
from benchmarks.harness.measure import Contender, Missing, Row, measure
from benchmarks.harness.peers import open_gloo
from tagi_ddp import Communicator

MEGABYTES = (1, 16, 88)


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(l) torch.distributed.all_reduce over shared memory, in place, against gloo."""
    dist = open_gloo(communicator, scratch)
    assert not isinstance(dist, Missing)  # the torch that has the backend has it
    groups = {"ours": dist.new_group(backend="tagi_ddp"), "gloo": dist.group.WORLD}
    found = [_compare(communicator, dist, groups, size, 1 if quick else 15) for size in MEGABYTES]
    dist.destroy_process_group()
    return found


def _compare(
    communicator: Communicator, dist: Any, groups: dict[str, Any], megabytes: int, rounds: int
) -> Row:
    tensor = torch.zeros(megabytes << 18)
    contenders = [
        Contender(name, lambda group=group: dist.all_reduce(tensor, group=group))
        for name, group in groups.items()
    ]
    figures = measure(communicator, contenders, rounds)
    return Row(
        f"torch.distributed.all_reduce, {megabytes} MB, {communicator.size} ranks, against gloo",
        figures["ours"].in_unit(1e3),
        figures["gloo"].in_unit(1e3),
        "ms",
        1.5,
    )
