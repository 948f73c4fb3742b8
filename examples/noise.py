"""Learn a value and the noise around it, and plot both: one of the UCI repository's sets.

python examples/noise.py --data boston.npz --plot noise.png

The file holds an array ``data``, [rows, columns], whose last column is the target; without one it
is scikit-learn's diabetes. The networks learn the value, and the expected variance of its noise
(AGVI), so nobody has to know that. Each row is predicted by an estimator of other rows.
"""

import argparse

import numpy as np
from pictures import BLUE, VERMILION, band, interval, panels, save
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold

from tagi_ddp import progress
from tagi_ddp.sklearn import TAGIRegressor


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="a file of numpy's, .npz; by default diabetes")
    parser.add_argument("--plot", default="noise.png", help="where the PNG file goes")
    options = parser.parse_args()
    if options.data is None:
        x, y = load_diabetes(return_X_y=True)
        target = "progression of diabetes, score"
    else:
        with np.load(options.data, allow_pickle=False) as file:
            x, y = file["data"][:, :-1], file["data"][:, -1]
        target = "target"

    mean, deviation = np.empty((2, len(y)))
    folds = list(KFold(5, shuffle=True, random_state=0).split(x))
    for known, test in progress(folds, unit="fold"):
        model = TAGIRegressor(random_state=0).fit(x[known], y[known])
        mean[test], deviation[test] = model.predict(x[test], return_std=True)
    z = (y - mean) / deviation
    likelihood = -(z**2 + np.log(2 * np.pi * deviation**2)) / 2
    print(f"RMSE {np.sqrt(np.mean((y - mean) ** 2)):.3f}")
    print(f"mean log-likelihood {likelihood.mean():.3f}")
    within = np.mean(np.abs(z) < 1.96)
    print(f"{within:.1%} of the rows are within their 95% interval")

    order = np.argsort(mean)
    figure, axes = panels()
    rows = np.arange(1, len(y) + 1)
    outside = np.abs(z[order]) >= 1.96
    band(axes, rows, *interval(mean, deviation**2)[:, order], BLUE, "predicted")
    axes.plot(rows[~outside], y[order][~outside], "k.", markersize=4, label="observed, within")
    axes.plot(rows[outside], y[order][outside], "x", color=VERMILION, label="observed, outside")
    axes.set(
        xlabel="rows, by their prediction",
        ylabel=target,
        xlim=(0, len(y) + 1),
        title=f"{len(y)} rows, each predicted from others: {100 * within:.1f} % are within",
    )
    axes.legend(loc="upper left", ncols=2)
    save(figure, options.plot)


if __name__ == "__main__":
    main()
