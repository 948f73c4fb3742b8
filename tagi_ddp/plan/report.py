"""Predictions for several numbers of ranks, as text and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tagi_ddp.engine.whole_file import whole_file
from tagi_ddp.plan.model import SCHEMES, Cluster, Training, predict
from tagi_ddp.plan.search import Budget, fewest_ranks, search

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito's, for readers who are colour-blind.
_MOST_TICKS = 9
_DPI = 150


def default_ranks(most: int = 10_000) -> list[int]:
    """Return 1, 2, 4, ... and ``most``."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def table(training: Training, cluster: Cluster, ranks: Sequence[int]) -> str:
    """Return the predictions as text, a line for each number of ranks."""
    step = 1e3 * training.step
    decimals = max(0, 2 - math.floor(math.log10(step)))  # A step has three digits.
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
        "MLP did on up to 16 ranks; the page on\nmerged posteriors says where that does not hold."
    )
    return "\n".join([*lines, "", note])


def within(training: Training, cluster: Cluster, budget: Budget) -> str:
    """Return as text the fewest ranks that keep within a budget, and their choice."""
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
    """Plot time per step and efficiency over the ranks, to a file; its suffix is the format.

    Raises ImportError if there is no matplotlib, OSError or ValueError about the path.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error
    with whole_file(path) as file:
        kind = Path(path).suffix.removeprefix(".") or "png"
        _draw(training, cluster, ranks).savefig(file, format=kind, dpi=_DPI)


def _draw(training: Training, cluster: Cluster, ranks: Sequence[int]) -> Figure:
    """Return the plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    times, efficiencies = figure.subplots(1, 2)
    predictions = [predict(training, cluster, number) for number in ranks]
    for scheme, marker, color in zip(SCHEMES, "os^", _COLOURS, strict=True):
        seconds = [prediction[scheme] for prediction in predictions]
        style = {"marker": marker, "color": color, "label": scheme}
        times.plot(ranks, [1e3 * time for time in seconds], **style)
        efficiencies.plot(ranks, [100 * training.step / time for time in seconds], **style)
    times.set(title="Time of a step", ylabel="ms per step", yscale="log")
    efficiencies.set(title="Share of computing", ylabel="efficiency in %", ylim=(0, 105))
    for axes in (times, efficiencies):
        axes.set(xlabel="ranks", xscale="log")
        axes.grid(color="0.9")
        axes.spines[["right", "top"]].set_visible(False)
        _plain_ticks(axes.xaxis, _powers_of_two(ranks))
    milliseconds = [1e3 * seconds for prediction in predictions for seconds in prediction.values()]
    ticks = _round_numbers(min(milliseconds), max(milliseconds))
    times.set_ylim(ticks[0], ticks[-1])
    _plain_ticks(times.yaxis, ticks)
    times.legend()
    return figure


def _powers_of_two(ranks: Sequence[int]) -> list[int]:
    """Return the powers of two in the range of ``ranks``, at most nine; if none, ``ranks``."""
    low, high = (min(ranks) - 1).bit_length(), max(ranks).bit_length()
    step = math.ceil((high - low) / _MOST_TICKS)
    return [1 << power for power in range(low, high, max(1, step))] or list(ranks)


def _round_numbers(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, from the last one below to the first one above."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    first = max(i for i, number in enumerate(found) if number <= low)
    last = min(i for i, number in enumerate(found) if number >= high)
    if last - first < _MOST_TICKS:
        return found[first : max(last, first + 1) + 1]
    return [10.0**decade for decade in decades]


def _plain_ticks(axis: Axis, ticks: Sequence[float]) -> None:
    """Label a logarithmic axis at these numbers, without exponents, and at no others."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(ticks, [f"{tick:.9f}".rstrip("0").rstrip(".") for tick in ticks])
    axis.set_minor_locator(NullLocator())
