"""The quality of merged posteriors of convolutions; see `rows`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.families.merging import ORDERS, Case, measure_cases
from benchmarks.harness.measure import Row
from tagi_ddp import Communicator


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(q) As the family ``merging``, by a CNN: 4 and 16 ranks that merge every 8 and 32 steps."""
    cases = [
        Case("CNN", 256, ranks, every, orders=orders)
        for ranks, orders in ((4, (0,)), (16, ORDERS))
        for every in (8, 32)
    ]
    if quick:
        cases = [Case("CNN", 64, 4, 2, {"compress": "int8"})]
    return measure_cases(communicator, quick, cases)
