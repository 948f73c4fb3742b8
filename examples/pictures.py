"""Functions that draw the examples' pictures; importing them sets matplotlib's defaults.

The colours are those of M. Okabe and K. Ito, which colour-blind people can tell apart.
"""

import io

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from PIL import Image

BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#999999"
DEFAULTS = {
    "axes.prop_cycle": matplotlib.cycler(color=[BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY]),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "grid.color": "#E5E5E5",
    "legend.edgecolor": "none",
    "savefig.dpi": 150,
}
matplotlib.rcParams.update(DEFAULTS)


def panels(rows=1, size=(8, 4), **options):
    """Return a figure of so many inches, and its axes, one below the other."""
    figure = Figure(size)
    return figure, figure.subplots(rows, **options)


def save(figure, path):
    """Write a PNG of 128 colours, which is less than half as large as one of all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    Image.open(picture).convert("RGB").quantize(128).save(path, format="png", optimize=True)


def plain_ticks(axis, ticks):
    """Show these numbers on a logarithmic axis, as they are, and no others."""
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def interval(mean, variance):
    """Return the low end, the middle and the high end of Gaussians' 95 % intervals."""
    return np.array([mean + deviations * np.sqrt(variance) for deviations in (-1.96, 0, 1.96)])


def band(axes, x, low, middle, high, color, label):
    """Draw 95 % intervals about a line."""
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0, label="95 % interval")
    axes.plot(x, middle, color=color, label=label)


def calibration(path, levels, shares, count):
    """Plot which share of ``count`` patients is within intervals of given probabilities.

    ``shares`` is by name. The band is where the shares of a calibrated network are, but for one of
    twenty: two standard deviations (sd) of a binomial to either side.
    """
    figure, (above, below) = panels(2, (5, 6), sharex=True, height_ratios=(3, 1))
    exact = np.linspace(0, 100, 101)
    deviation = 2 * np.sqrt(exact * (100 - exact) / count)
    for axes, ideal in (above, exact), (below, 0 * exact):
        band = {"color": "#DDDDDD", "label": f"± 2 sd, {count} patients"}
        axes.plot(exact, ideal, "--", color="#555555", linewidth=1, label="ideal")
        axes.fill_between(exact, ideal - deviation, ideal + deviation, **band)
    for (name, share), marker in zip(shares.items(), "os^", strict=False):
        above.plot(100 * levels, 100 * share, marker=marker, markersize=5, label=name)
        below.plot(100 * levels, 100 * (share - levels), marker=marker, markersize=5)
    above.set(ylabel="patients within it, in %", xlim=(0, 100), ylim=(0, 100))
    below.set(xlabel="probability of the interval, in %", ylabel="difference,\nin points")
    above.set_title("Calibration of predicted intervals")
    above.legend(loc="upper left")
    save(figure, path)


def agreement(path, steps, window=20):
    """Plot how much alike ranks learn, [steps, layers], and the mean over some steps."""
    figure, axes = panels()
    number = np.arange(1, 1 + len(steps))
    for layer, values in enumerate(np.transpose(steps)):
        axes.plot(number, values, ".", color=f"C{layer}", alpha=0.3, markersize=4)
        mean = np.convolve(values, np.full(window, 1 / window), "valid")
        axes.plot(number[window - 1 :], mean, color=f"C{layer}", label=f"layer {layer + 1}")
    axes.set(xlabel="step", ylabel="0: orthogonal changes, 1: the same", ylim=(0, 1))
    axes.set_title(f"Agreement of ranks at each merge, and its mean over {window}")
    axes.legend(ncols=3)
    save(figure, path)


def forecasts(path, known, future, mean, variance, count=3):
    """Plot the forecasts of the first series below what came."""
    figure, all_axes = panels(count, (8, 7))
    for axes, one, new, *moments in zip(all_axes, known, future, mean, variance, strict=False):
        periods = np.arange(-min(len(one), 3 * len(new)), len(new))
        axes.plot(periods, np.append(one, new)[-len(periods) :], color=BLUE, label="observed")
        band(axes, periods[-len(new) :], *interval(*moments), VERMILION, "forecast")
    all_axes[0].set_title("Forecasts of unseen periods")
    all_axes[0].legend(loc="upper left", ncols=3)
    all_axes[-1].set(xlabel="periods after the last one that is known")
    save(figure, path)


def reliability(path, curves):
    """Plot accuracy over confidence, by name: the bins of `tagi_ddp.data.reliability`.

    The band is where nineteen of twenty accuracies of a calibrated network are: two standard
    deviations (sd) of a binomial's share to either side.
    """
    figure, axes = panels(size=(5, 5))
    axes.plot([0, 1], [0, 1], "--", color="#555555", linewidth=1, label="ideal")
    for number, (name, bins) in enumerate(curves.items()):
        filled = bins.counts > 0
        middle, accuracy = bins.confidence[filled], bins.accuracy[filled]
        bars = 2 * np.sqrt(middle * (1 - middle) / bins.counts[filled])
        axes.plot(middle, accuracy, "os^v"[number], label=name)
        axes.fill_between(
            middle, middle - bars, middle + bars, color=f"C{number}", alpha=0.2, label="± 2 sd"
        )
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.set_title("Reliability of class probabilities")
    axes.legend(loc="upper left")
    save(figure, path)
