"""Measure all rows, print the table, write it as JSON."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.launch import ROOT, measure_families
from benchmarks.harness.measure import Row
from benchmarks.harness.report import describe_machine, print_table, write_json
from tagi_ddp import BackendUnavailable
from tagi_ddp.communicators.nccl.libraries import open_cuda

Family = tuple[str, int]  # its name, and the number of ranks
FAMILIES = (("steps", 2), ("all_reduce", 2), ("all_reduce", 4), ("training", 2))
TORCH_FAMILIES = (
    ("compute", 1),
    ("small", 1),
    ("small", 2),
    ("checkpoints", 2),
    ("elastic", 1),
    ("uci", 2),
    ("estimators", 2),
    ("scaling", 2),
    ("memory", 1),
    ("overlap", 2),
    ("edges", 1),
    ("sharding", 2),
    ("torch_backend", 2),
    ("nodes", 2),
    ("hosts", 8),
    ("start", 1),
    ("plan", 16),
    ("calibration", 4),
    ("merging", 16),
    ("merging_cnn", 16),
    ("shards", 2),
    ("mnist", 4),
    ("large_batches", 16),
    ("batch_invariance", 16),
    ("tourism", 2),
    ("m3", 2),
    ("out_of_distribution", 4),
)
# Families by one name.
GROUPS = {
    "proofs": ("mnist", "large_batches", "batch_invariance", "tourism", "m3", "out_of_distribution")
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="FAMILY", help="measure these; else all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks, too
    machine = describe_machine()
    print(machine)
    print(f"Load average before: {os.getloadavg()[0]:.2f}. Medians [quartiles].", flush=True)
    families = FAMILIES
    if importlib.util.find_spec("torch"):
        ranks = max(2, count_gpus())
        families += (*TORCH_FAMILIES, ("gpu_steps", 1), ("gpu_calls", 1))
        families += (("gpu_calls", ranks), ("gpu_exchange", ranks))
    else:
        print("torch is not installed: no rows of what it computes.")
    only = {family for name in options.only for family in GROUPS.get(name, (name,))}
    if unknown := only - {family for family, _ in families}:
        parser.error(
            f"no family {', '.join(sorted(unknown))}; there are "
            f"{', '.join(dict(families) | GROUPS)}"
        )
    if options.quick:
        families = tuple((name, min(ranks, 4)) for name, ranks in families)
    start = time.monotonic()
    chosen = [pair for pair in families if not only or pair[0] in only]
    found: dict[Family, list[Row]] = {}
    try:
        for names, ranks in batches(chosen, together=options.quick):
            with sharing(names, ranks):
                measured = measure_families(names, ranks, options.quick)
            found |= {(name, ranks): rows for name, rows in measured.items()}
    finally:  # what was measured before a family failed took minutes
        rows = [row for pair in chosen for row in found.get(pair, ())]
        if rows:
            print_table(rows)
            write_json(rows, machine, options.output)
            print(f"{time.monotonic() - start:.0f} s; written to {options.output}")


def batches(chosen: Sequence[Family], together: bool) -> Iterator[tuple[list[str], int]]:
    """Yield the families that run in the same processes: each alone, but in a quick run."""
    by_ranks: dict[int, list[str]] = {}
    for name, ranks in chosen:
        by_ranks.setdefault(ranks, []).append(name)
    if together:
        yield from ((names, ranks) for ranks, names in by_ranks.items())
    else:
        yield from (([name], ranks) for name, ranks in chosen)


def sharing(names: Sequence[str], ranks: int) -> contextlib.AbstractContextManager[None]:
    """Return what lets ranks that are more than the GPUs be there at once."""
    if not any(name.startswith("gpu_") for name in names) or not 0 < count_gpus() < ranks:
        return contextlib.nullcontext()
    from benchmarks.harness.gpus import at_once_on_a_gpu  # needs torch

    return at_once_on_a_gpu()


def count_gpus() -> int:
    """Return how many devices CUDA shows; none without CUDA."""
    try:
        return open_cuda().device_count
    except BackendUnavailable:
        return 0


if __name__ == "__main__":
    main()
