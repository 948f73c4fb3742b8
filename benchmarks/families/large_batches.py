"""Large batches of MNIST in small steps of the ranks, and in one; see `rows`."""

from __future__ import annotations

import itertools
from pathlib import Path

from pytagi.nn import Linear, ReLU, Sequential

from benchmarks.harness.classify import Setting, figure_of, plural, scores_of_seeds
from benchmarks.harness.datasets import images
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import TREE
from tagi_ddp import Communicator

SEEDS, EPOCHS, SIGMA_V = 1, 3, 0.05
LARGE, LOCAL = (256, 1024, 4096), (16, 32)
BAR = 2.6  # error in %, at every batch
PUBLISHED = {16: 2.59, 256: 2.80, 1024: 3.33}  # with a capped step
# None: the engine's.
CAP_FACTORS = {16: (None,), 256: (None, 20), 1024: (None, 10), 4096: (None, 6)}


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """Test errors of an MLP, 3 x 256 units: one process, with two limits of a step; local batches.

    The published errors are those of one process with a capped step.
    """
    data = images("mnist", 200 if quick else None)
    if isinstance(data, str):
        return [Row("large batches", Missing(data), Missing(data), "", None)]
    seeds, epochs = (1, 1) if quick else (SEEDS, EPOCHS)
    none = Missing("no figure was published")

    def error(ranks: int, setting: Setting) -> Figure:
        found = scores_of_seeds(communicator, ranks, seeds, setting, data)
        return figure_of([100 * one.error for one in found])

    table = []
    for batch, factors in CAP_FACTORS.items():
        other = Figure.single(PUBLISHED[batch]) if batch in PUBLISHED else none
        for factor in factors:
            setting = Setting(_mlp, batch, epochs, SIGMA_V, cap_factor=factor)
            name = f"batch {batch}, one process, cap factor {factor or 'of the engine'}"
            table.append(Row(name, error(1, setting), other, "%", None))
    for batch, ranks in itertools.product(LARGE, (1, 2, 4, 8, 16)):
        if ranks > communicator.size:
            continue
        for local in sorted({min(one, batch // ranks) for one in LOCAL}):
            setting = Setting(_mlp, batch, epochs, SIGMA_V, local)
            name = f"batch {batch}, {plural(ranks)}, local batches of {local}"
            table.append(Row(name, error(ranks, setting), Figure.single(BAR), "%", 1.0))
    return table


def _mlp() -> Sequential:
    layers = [Linear(784, 256), ReLU(), Linear(256, 256), ReLU(), Linear(256, 256), ReLU()]
    return Sequential(*layers, Linear(256, TREE.outputs))
