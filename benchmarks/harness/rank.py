"""The program of each rank: ``python -m benchmarks.harness.rank FOLDER FAMILY ... [--quick]``.

Rank 0 leaves the rows by family, pickled, in FOLDER/rows.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import sys
from pathlib import Path

import tagi_ddp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[2] / "examples"))  # which import each other
    with tagi_ddp.init("shm") as communicator:
        rows = {}
        for name in options.families:
            family = importlib.import_module(f"benchmarks.families.{name}")
            rows[name] = family.rows(communicator, options.quick, options.folder)
        if communicator.rank == 0:
            (options.folder / "rows").write_bytes(pickle.dumps(rows))


if __name__ == "__main__":
    main()
