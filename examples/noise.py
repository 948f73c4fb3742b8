"""Learn a value and the noise around it, and plot both: one of the UCI repository's sets.

python examples/noise.py --data boston.npz --plot noise.png

The file holds an array ``data``, [rows, columns], whose last column is the target; without one it
is scikit-learn's diabetes. The network has two outputs: the value, and the expected variance of
its noise (AGVI), so nobody has to know that. Each row is predicted by a network of other rows.
"""

import argparse

import numpy as np
import pytagi
from matplotlib.figure import Figure
from pytagi.nn import EvenExp, Linear, ReLU, Sequential
from sklearn.datasets import load_diabetes

from tagi_ddp import accelerate, progress

BATCH, FOLDS = 10, 5
NOISE_GAIN = 0.1  # of the weights that the noise's output begins with, to those of the value


def network(inputs):
    model = Sequential(Linear(inputs, 50), ReLU(), Linear(50, 2), EvenExp())
    state = model.state_dict()
    means, variances, *biases = map(np.array, state["Linear.2"])
    means[50:] *= NOISE_GAIN
    variances[50:] *= NOISE_GAIN**2
    state["Linear.2"] = (means.tolist(), variances.tolist(), *(b.tolist() for b in biases))
    model.load_state_dict(state)
    return accelerate(model)


def predict(x, y, test, epochs):
    """Return mean, variance of the mean and variance of the noise of the rows of ``test``."""
    pytagi.manual_seed(0)
    rng = np.random.default_rng(0)
    model = network(x.shape[1])
    known = np.flatnonzero(~test)
    for _ in range(epochs):
        rng.shuffle(known)
        for begin in range(0, len(known), BATCH):
            batch = known[begin : begin + BATCH]
            model.learn(x[batch], y[batch])
    model.eval()
    mean, variance = model(x[test])
    return mean[::2], variance[::2], mean[1::2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="a file of numpy's, .npz; by default diabetes")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--plot", default="noise.png", help="where the PNG file goes")
    options = parser.parse_args()
    if options.data is None:
        x, y = load_diabetes(return_X_y=True)
    else:
        with np.load(options.data, allow_pickle=False) as file:
            x, y = file["data"][:, :-1], file["data"][:, -1]
    x = ((x - x.mean(0)) / np.maximum(x.std(0), 1e-9)).astype(np.float32)
    center, scale = y.mean(), y.std()
    y = ((y - center) / scale).astype(np.float32)

    fold = np.random.default_rng(0).permutation(len(x)) % FOLDS
    parts = np.empty((3, len(x)))
    for k in progress(range(FOLDS), unit="fold"):
        parts[:, fold == k] = predict(x, y, fold == k, options.epochs)
    mean, model_variance, noise = parts
    deviation = np.sqrt(model_variance + noise)
    z = (y - mean) / deviation
    likelihood = -(z**2 + np.log(2 * np.pi * (scale * deviation) ** 2)) / 2
    print(f"RMSE {scale * np.sqrt(np.mean((y - mean) ** 2)):.3f}")
    print(f"mean log-likelihood {likelihood.mean():.3f}")
    print(f"{np.mean(np.abs(z) < 1.96):.1%} of the rows are within their 95% interval")

    order = np.argsort(mean)
    middle, actual = (center + scale * values[order] for values in (mean, y))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for width, label in ((deviation, "noise, too"), (np.sqrt(model_variance), "the mean alone")):
        spread = 1.96 * scale * width[order]
        axes.fill_between(range(len(x)), middle - spread, middle + spread, alpha=0.3, label=label)
    axes.plot(actual, ".", markersize=3, label="observed")
    axes.plot(middle, label="predicted")
    axes.set(xlabel="rows, by their prediction", ylabel="target, with 95 % intervals")
    axes.legend()
    figure.savefig(options.plot, format="png")


if __name__ == "__main__":
    main()
