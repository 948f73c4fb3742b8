"""Single operations of ranks on GPUs, against torch's ProcessGroupNCCL; see `rows`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.gpus import (
    OnGpus,
    Ways,
    measure_queued,
    ranks_of,
    ranks_on_gpus,
    why_no_ranks,
)
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.peers import open_torch_nccl
from tagi_ddp import Communicator

SMALL, LARGE = 4 << 10, 256 << 20  # bytes
ROUNDS = 15
# What a row measures, the bytes, calls in a row before the host waits, and the unit.
ROWS = (
    ("4 KB, waited for", SMALL, 1, "us"),
    ("4 KB, of 100 in a row", SMALL, 100, "us"),
    ("256 MB", LARGE, 5, "GB/s"),
)


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(m) all_reduce of a tensor in place, until it is there; both use the same NCCL."""
    if reason := why_no_ranks(communicator):
        where, missing = f"{ranks_of(communicator)} on GPUs", Missing(reason)
        return [_row(what, where, missing, missing, unit) for what, _, _, unit in ROWS]
    with ranks_on_gpus(communicator) as gpus:
        theirs = open_torch_nccl(communicator, scratch, gpus.device)
        found = [
            _compare(communicator, gpus, theirs, what, SMALL if quick else size, calls, unit)
            for what, size, calls, unit in ROWS
        ]
        if not isinstance(theirs, Missing):
            theirs.destroy_process_group()
    return found


def _compare(
    communicator: Communicator,
    gpus: OnGpus,
    theirs: Any | Missing,
    what: str,
    size: int,
    calls: int,
    unit: str,
) -> Row:
    tensor = torch.zeros(size // 4, device=gpus.device)

    def reduce() -> None:
        if calls == 1:
            gpus.nccl.all_reduce(tensor)
        else:
            gpus.nccl.all_reduce(tensor, async_op=True).order()

    ways: Ways = {"ours": reduce}
    if not isinstance(theirs, Missing):
        ways["theirs"] = lambda: theirs.all_reduce(tensor)
    found = measure_queued(communicator, ways, gpus.device, calls, ROUNDS)

    def figure(way: str) -> Figure:
        return found[way].rate(size / 1e9) if unit == "GB/s" else found[way].in_unit(1e6)

    other = theirs if isinstance(theirs, Missing) else figure("theirs")
    return _row(what, gpus.where, figure("ours"), other, unit)


def _row(what: str, where: str, ours: Figure | Missing, other: Figure | Missing, unit: str) -> Row:
    name = f"all_reduce, {what}, {where}, against torch's ProcessGroupNCCL"
    return Row(name, ours, other, unit, None)
