"""Large batches of MNIST in small steps of the ranks, and in one; see `rows`."""

from __future__ import annotations

from pathlib import Path

from pytagi.nn import Linear, ReLU, Sequential

from benchmarks.harness.classify import Setting, figure_of, scores_of_seeds
from benchmarks.harness.datasets import images
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.work import TREE
from tagi_ddp import Communicator

SEEDS, EPOCHS, SIGMA_V, LOCAL = 1, 3, 0.05, 32
BAR = 2.6  # error in %, at every batch
PUBLISHED = {16: 2.59, 256: 2.80, 1024: 3.33}  # with a capped step
CAP_FACTORS = {256: 10, 1024: 30, 4096: 100}


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
    for batch in (16, *CAP_FACTORS):
        other = Figure.single(PUBLISHED[batch]) if batch in PUBLISHED else none
        name = f"batch {batch}, 1 rank, one step, "
        for text, factor in (("the engine's", None), ("a larger", CAP_FACTORS.get(batch))):
            if text == "the engine's" or factor is not None:
                setting = Setting(_mlp, batch, epochs, SIGMA_V, cap_factor=factor)
                words = f"{text} cap factor" + f" of {factor}" * (factor is not None)
                table.append(Row(name + words, error(1, setting), other, "%", None))
    for batch in CAP_FACTORS:
        for ranks in (1, 2, 4, 8, 16):
            if ranks <= communicator.size:
                local = Setting(_mlp, batch, epochs, SIGMA_V, min(LOCAL, batch // ranks))
                name = f"batch {batch}, {ranks} ranks, local batches of {local.local}"
                table.append(Row(name, error(ranks, local), Figure.single(BAR), "%", 1.0))
    return table


def _mlp() -> Sequential:
    layers = [Linear(784, 256), ReLU(), Linear(256, 256), ReLU(), Linear(256, 256), ReLU()]
    return Sequential(*layers, Linear(256, TREE.outputs))
