"""Predict the progression of diabetes with honest uncertainty, on several processes.

tagi-ddp run -n 2 examples/regression.py --plot calibration.png

Each patient is predicted by a network that was trained on others. The variance is what the network
does not know, plus sigma**2 for what the inputs do not tell, chosen by a held-out likelihood.
"""

import argparse
from statistics import NormalDist

import numpy as np
import pytagi
from pictures import calibration
from pytagi.nn import Linear, ReLU, Sequential
from sklearn.datasets import load_diabetes

import tagi_ddp
from tagi_ddp import DistributedSampler, progress, reduce_metrics
from tagi_ddp.data import share_of

BATCH = 16  # of all ranks together
FOLDS = 5
PATIENTS = 442
SIGMAS = (0.5, 0.6, 0.7, 0.8, 0.9)  # in units of SCALE
CENTRE, SCALE = 150.0, 75.0  # roughly those of the target, a score from 25 to 346
LEVELS = np.arange(1, 20) / 20  # probabilities of intervals: 5 %, 10 %, ... 95 %
QUANTILES = np.array([NormalDist().inv_cdf((1 + level) / 2) for level in LEVELS])


def train(comm, x, y, sigma, epochs):
    pytagi.manual_seed(0)
    net = Sequential(Linear(x.shape[1], 32), ReLU(), Linear(32, 1))
    model = tagi_ddp.DDPSequential(net, average=False, communicator=comm)
    sampler = DistributedSampler(x, comm.size, comm.rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for share in sampler.batches(BATCH):  # this rank's part of each batch
            model.learn(x[share], y[share], sigma**2)
    model.check_replicas()
    return model


def score(model, x, y, sigma):
    """Return the means over all of x: squared error, log-likelihood, hits by level."""
    share = share_of(len(x), model.communicator.rank, model.communicator.size)
    mean, variance = (part[:, 0] for part in model.predict(x[share], sigma**2))
    z = (y[share] - mean) / np.sqrt(variance)
    log_likelihood = -(z**2 + np.log(2 * np.pi * variance)) / 2
    hits = np.sum(np.abs(z)[:, None] <= QUANTILES, axis=0)
    sums = [np.sum((y[share] - mean) ** 2), np.sum(log_likelihood), *hits]
    return reduce_metrics(model.communicator, sums, len(z))


def cross_validate(comm, epochs):
    x, y = load_diabetes(return_X_y=True)
    x, y = (x / x.std()).astype(np.float32), ((y - CENTRE) / SCALE).astype(np.float32)
    fold = np.random.default_rng(0).permutation(len(x)) % FOLDS
    means = np.zeros(2 + len(LEVELS))
    for test in progress(range(FOLDS), unit="fold"):
        known, held_out = fold != test, fold == (test + 1) % FOLDS
        rest, likelihood = known & ~held_out, {}
        for sigma in SIGMAS:
            model = train(comm, x[rest], y[rest], sigma, epochs)
            likelihood[sigma] = score(model, x[held_out], y[held_out], sigma)[1]
        sigma = max(SIGMAS, key=likelihood.get)
        model = train(comm, x[known], y[known], sigma, epochs)
        means += score(model, x[~known], y[~known], sigma) * np.mean(~known)
    return SCALE * np.sqrt(means[0]), means[1] - np.log(SCALE), means[2:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plot", default="calibration.png", help="where the PNG file goes")
    options = parser.parse_args()
    with tagi_ddp.init() as comm:
        rmse, log_likelihood, coverage = cross_validate(comm, options.epochs)
    if comm.rank > 0:
        return
    print(f"RMSE {rmse:.1f}, mean log-likelihood {log_likelihood:.3f}")
    for i in (9, 17, 18):
        print(f"{coverage[i]:.1%} of the patients are within their {LEVELS[i]:.0%} interval")
    calibration(options.plot, LEVELS, {"cross-validated": coverage}, PATIENTS)


if __name__ == "__main__":
    main()
