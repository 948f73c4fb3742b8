"""Predictions for many numbers of ranks: as text, and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tagi_ddp.engine.whole_file import whole_file
from tagi_ddp.plan.model import SCHEMES, Cluster, Training, predict
from tagi_ddp.plan.search import Budget, fewest_ranks, search


def default_ranks(most: int = 10_000) -> list[int]:
    """Return 1, 2, 4, ... and ``most``."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def table(training: Training, cluster: Cluster, ranks: Sequence[int]) -> str:
    """Return the predictions as text, a line for each number of ranks."""
    step = 1e3 * training.step
    decimals = max(0, 2 - math.floor(math.log10(step)))  # three digits of the step
    columns = [
        ["ranks", *(str(number) for number in ranks)],
        ["nodes", *(str(cluster.nodes(number)) for number in ranks)],
    ]
    predictions = [predict(training, cluster, number) for number in ranks]
    for scheme in SCHEMES:
        seconds = [prediction[scheme] for prediction in predictions]
        columns.append([f"{scheme} ms", *(f"{1e3 * time:.{decimals}f}" for time in seconds)])
        columns.append(["efficiency", *(f"{training.step / time:.1%}" for time in seconds)])
    best = [search(training, cluster, number) for number in ranks]
    columns.append(["best ms", *(f"{1e3 * choice.seconds:.{decimals}f}" for choice in best)])
    held = (choice.memory(training, cluster, n) for choice, n in zip(best, ranks, strict=True))
    columns.append(["MB", *(f"{size / 1e6:,.{0 if size > 1e8 else 3}f}" for size in held)])
    columns.append(["by", *map(str, best)])
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    note = (
        "ms: milliseconds per step. efficiency: of these, what one rank alone takes. Each rank's "
        "share of a\nbatch is the same at any number of ranks. best: the most cautious of what "
        "takes at most 5 % more\nthan the least time. MB: what a rank then holds for the network, "
        "10^6 bytes; activations come on\ntop. It assumes that all need equally many steps, as an "
        "MLP did on up to 16 ranks; docs/merging.md\nsays where that does not hold."
    )
    return "\n".join([*lines, "", note])


def within(training: Training, cluster: Cluster, budget: Budget) -> str:
    """Return as text what keeps within a budget."""
    asked = f"{budget.shares:,.0f} shares within {budget.seconds / 3600:g} h"
    if math.isfinite(budget.memory):
        asked += f" and {budget.memory / 1e9:g} GB"
    found = fewest_ranks(training, cluster, budget)
    if found is None:
        return f"{asked}: no number of ranks up to 10,000 keeps within that."
    ranks, choice = found
    hours = choice.seconds * budget.shares / ranks / 3600
    return (
        f"{asked}: {ranks} ranks, {cluster.nodes(ranks)} nodes, by {choice}: "
        f"{hours:.2f} h, {ranks * hours:.1f} rank hours."
    )


def plot(path: str | Path, training: Training, cluster: Cluster, ranks: Sequence[int]) -> None:
    """Plot time per step and efficiency over the ranks, to a file of the kind that its name tells.

    Raises ImportError if there is no matplotlib, OSError or ValueError about the path.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'tagi-ddp[examples]'") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    times, efficiencies = figure.subplots(1, 2)
    predictions = [predict(training, cluster, number) for number in ranks]
    for scheme in SCHEMES:
        seconds = [prediction[scheme] for prediction in predictions]
        times.plot(ranks, [1e3 * time for time in seconds], ".-", label=scheme)
        efficiencies.plot(ranks, [100 * training.step / time for time in seconds], ".-")
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms per step")
    efficiencies.set(xscale="log", ylim=(0, 105), xlabel="ranks", ylabel="efficiency in %")
    times.legend()
    with whole_file(path) as file:
        figure.savefig(file, format=Path(path).suffix.removeprefix(".") or "png")
