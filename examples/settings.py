"""Compare settings of training: test error, and how many of 90 % intervals hold.

python examples/settings.py --over batch --plot batch.png

Three sets, split anew for each of three seeds: ripples over two inputs, sin(2 a) b, with a noise of
0.3 standard deviations; scikit-learn's diabetes; its handwritten digits. One setting changes, each
line is a noise, and the others are batches of 16, 20 epochs and one hidden layer of 50. Inputs and
targets are standardised. The noise of the digits belongs to observations of 1 and -1.
"""

import argparse
from statistics import NormalDist

import numpy as np
from pictures import panels, plain_ticks, save
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split

from tagi_ddp import progress
from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor


def ripples():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (2000, 2))
    y = np.sin(2 * x[:, 0]) * x[:, 1]
    return x, y / y.std() + rng.normal(0, 0.3, len(y))


SETS = {
    "ripples, noise 0.3": ripples,
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "digits": lambda: load_digits(return_X_y=True),
}
SETTINGS = {
    "batch": ("batch_size", (1, 4, 16, 64, 256, 1024)),
    "epochs": ("max_iter", (1, 3, 10, 30, 100)),
    "width": ("hidden_layer_sizes", (10, 30, 100, 300)),
}
NOISES = (0.05, 0.1, 0.3, 0.7, 1)
HALF = NormalDist().inv_cdf(0.95)  # of a 90 % interval, in standard deviations


def score(name, noise, seed, options):
    """Return the test error, and which share of the targets is in its 90 % interval."""
    x, y = SETS[name]()
    x, test_x, y, test_y = train_test_split(x, y, test_size=0.25, random_state=seed)
    options = {"max_iter": 20, "batch_size": 16, "random_state": seed, **options}
    if name == "digits":
        model = TAGIClassifier(noise=noise, **options).fit(x, y)
        probability = model.predict_proba(test_x)
        own = np.take_along_axis(probability, test_y[:, None], axis=1)
        # The interval is a set: the most probable labels, until they have 90 % together.
        before = np.sum(probability, axis=1, where=probability > own)
        return np.mean(probability.argmax(axis=1) != test_y), np.mean(before < 0.9)
    model = TAGIRegressor(noise=noise * y.std(), **options).fit(x, y)
    mean, deviation = model.predict(test_x, return_std=True)
    error = test_y - mean
    return np.sqrt(np.mean(error**2)) / y.std(), np.mean(np.abs(error) < HALF * deviation)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--over", choices=SETTINGS, default="batch", help="the setting to change")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", default="settings.png", help="where the PNG file goes")
    options = parser.parse_args()
    argument, values = SETTINGS[options.over]
    figure, axes = panels(2, (8, 5), ncols=len(SETS), sharex=True)
    runs = [(column, noise) for column in range(len(SETS)) for noise in NOISES]
    for column, noise in progress(runs, unit="line"):
        name = list(SETS)[column]
        found = [
            [score(name, noise, seed, {argument: value}) for seed in range(options.seeds)]
            for value in values
        ]
        error, within = np.mean(found, axis=1).T
        print(f"{name}, noise {noise:g}, by {options.over}:", flush=True)
        print("  error  " + "  ".join(f"{number:.3f}" for number in error))
        print("  within " + "  ".join(f"{number:5.0%}" for number in within), flush=True)
        for row, numbers in zip(axes[:, column], (error, 100 * within), strict=True):
            row.plot(values, numbers, "o-", markersize=3, label=f"noise {noise:g}")
    for column, name in enumerate(SETS):
        axes[0, column].set(title=name, ylim=(0, None))
        axes[1, column].axhline(90, linestyle="--", color="#555555", linewidth=1)
        axes[1, column].set(xscale="log", xlabel=options.over, ylim=(0, 100))
        plain_ticks(axes[1, column].xaxis, values)
    axes[0, 0].set_ylabel("test error")
    axes[1, 0].set_ylabel("within 90 % intervals, in %")
    axes[0, -1].legend(fontsize="small")
    save(figure, options.plot)


if __name__ == "__main__":
    main()
