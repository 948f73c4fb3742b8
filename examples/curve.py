"""Learn a noisy curve, as the README's script does, and plot it with 90 % intervals.

python examples/curve.py --plot curve.png
"""

import argparse
from statistics import NormalDist

import numpy as np
import pytagi
from pictures import BLUE, VERMILION, panels, save
from pytagi.nn import Linear, ReLU, Sequential

from tagi_ddp import accelerate, progress

NOISE = 0.1**2
HALF = NormalDist().inv_cdf(0.95)  # of a 90 % interval, in standard deviations


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--plot", default="curve.png", help="where the PNG file goes")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.uniform(-1.7, 1.7, (1200, 1)).astype(np.float32)
    y = (np.sin(3 * x) + rng.normal(0, 0.1, x.shape)).astype(np.float32)

    pytagi.manual_seed(0)
    hidden = Linear(1, 64), ReLU(), Linear(64, 64), ReLU()
    model = accelerate(Sequential(*hidden, Linear(64, 1)))
    for _ in progress(range(options.epochs), unit="epoch"):
        for batch in np.split(rng.permutation(1000), range(16, 1000, 16)):
            model.learn(x[batch], y[batch], NOISE)

    mean, variance = model.predict(x[1000:], NOISE)
    inside = np.abs(y[1000:] - mean) < HALF * np.sqrt(variance)
    print(f"{np.mean(inside):.0%} of the test points are in their 90 % interval")

    figure, axes = panels(size=(8, 3.5))
    grid = np.linspace(-2.5, 2.5, 500)
    mean, variance = (part[:, 0] for part in model.predict(grid, NOISE))
    half = HALF * np.sqrt(variance)
    axes.fill_between(grid, mean - half, mean + half, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(grid, mean, color=BLUE, label="predicted, with 90 % intervals")
    axes.plot(x[1000:], y[1000:], ".", color=VERMILION, markersize=4, label="test points")
    axes.set(xlabel="x", ylabel="y", xlim=(-2.5, 2.5), ylim=(-3, 3))
    axes.set_title("Beyond the data, ±1.7, the intervals grow")
    axes.legend(loc="upper left", ncols=2)
    save(figure, options.plot)


if __name__ == "__main__":
    main()
