"""Measure all rows, print the table, write it as JSON."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path

from benchmarks.harness.launch import ROOT, measure_family
from benchmarks.harness.measure import Row
from benchmarks.harness.report import describe_machine, print_table, write_json
from tagi_ddp import BackendUnavailable
from tagi_ddp.communicators.nccl.libraries import open_cuda

# By name, the number of ranks.
FAMILIES = (("steps", 2), ("all_reduce", 2), ("all_reduce", 4), ("training", 2))
TORCH_FAMILIES = (
    ("compute", 1),
    ("scaling", 2),
    ("memory", 1),
    ("overlap", 2),
    ("edges", 1),
    ("sharding", 2),
    ("torch_backend", 2),
    ("sharded", 2),
    ("nodes", 2),
    ("calibration", 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="FAMILY", help="measure these; else all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    options = parser.parse_args()

    machine = describe_machine()
    print(machine)
    print(f"Load average before: {os.getloadavg()[0]:.2f}. Medians [quartiles].", flush=True)
    families = FAMILIES
    if importlib.util.find_spec("torch"):
        families += (*TORCH_FAMILIES, ("gpu", max(2, count_gpus())))
    else:
        print("torch is not installed: no rows of what it computes.")
    if unknown := set(options.only) - {family for family, _ in families}:
        parser.error(
            f"no family {', '.join(sorted(unknown))}; there are {', '.join(dict(families))}"
        )
    start = time.monotonic()
    rows: list[Row] = []
    try:
        for family, ranks in families:
            if not options.only or family in options.only:
                rows += measure_family(family, ranks, options.quick)
    finally:  # what was measured before a family failed took minutes
        if rows:
            print_table(rows)
            write_json(rows, machine, options.output)
            print(f"{time.monotonic() - start:.0f} s; written to {options.output}")


def count_gpus() -> int:
    """Return how many devices CUDA shows; none without CUDA."""
    try:
        return open_cuda().device_count
    except BackendUnavailable:
        return 0


if __name__ == "__main__":
    main()
