"""Predict the progression of diabetes by an ensemble of networks, one or more processes each.

tagi-ddp run -n 4 examples/ensemble.py --plot ensemble.png

Each process trains a member, which begins from parameters and sees the patients in an order of its
own. With --ranks-per-member 2 two processes train a member together. The ensemble predicts the
mixture of its members' Gaussians; it is compared with its first member alone.
"""

import argparse
from statistics import NormalDist

import numpy as np
from pictures import calibration
from pytagi.nn import Linear, ReLU, Sequential
from sklearn.datasets import load_diabetes

import tagi_ddp
from tagi_ddp import DistributedSampler, reduce_metrics
from tagi_ddp.strategy import DDPEnsGroupStrategy

BATCH = 16  # of all ranks of a member together
FOLDS = 5
PATIENTS = 442
SIGMA = 0.7  # what the inputs do not tell, in units of SCALE
CENTRE, SCALE = 150.0, 75.0  # roughly those of the target, a score from 25 to 346
LEVELS = np.arange(1, 20) / 20  # probabilities of intervals: 5 %, 10 %, ... 95 %
QUANTILES = np.array([NormalDist().inv_cdf((1 + level) / 2) for level in LEVELS])

NAMES = ("one network", "ensemble")


def train(strategy, x, y, epochs):
    net = Sequential(Linear(x.shape[1], 64), ReLU(), Linear(64, 1))  # drawn by the member's seed
    model = strategy.setup(net)
    group, member = strategy.group, strategy.layout.member
    sampler = DistributedSampler(x, group.size, group.rank, seed=member)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for share in sampler.batches(BATCH):  # this rank's part of each batch
            model.learn(x[share], y[share], SIGMA**2)
    return model


def score(y, mean, variance):
    """Return sums over the patients: squared error, log-likelihood, hits by level."""
    deviation = np.sqrt(variance + SIGMA**2)
    z = (y - mean) / deviation
    log_likelihood = -(z**2) / 2 - np.log(SCALE * np.sqrt(2 * np.pi) * deviation)
    hits = np.sum(np.abs(z)[:, None] <= QUANTILES, axis=0)
    return np.array([np.sum((SCALE * (y - mean)) ** 2), np.sum(log_likelihood), *hits])


def cross_validate(strategy, epochs):
    """Return the means over all patients for the first member and for the ensemble."""
    x, y = load_diabetes(return_X_y=True)
    x, y = (x / x.std()).astype(np.float32), ((y - CENTRE) / SCALE).astype(np.float32)
    fold = np.random.default_rng(0).permutation(len(x)) % FOLDS
    sums, count = np.zeros((2, 2 + len(LEVELS))), 0
    for test in range(FOLDS):
        model = train(strategy, x[fold != test], y[fold != test], epochs)
        share = np.flatnonzero(fold == test)[strategy.group.rank :: strategy.group.size]
        own = model(x[share])
        sums += [score(y[share], *own), score(y[share], *strategy.mixture(*own))]
        count += len(share)
    return reduce_metrics(strategy.group, sums, count)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ranks-per-member", type=int, default=1)
    parser.add_argument("--plot", default="ensemble.png", help="where the PNG file goes")
    options = parser.parse_args()
    with tagi_ddp.init() as world:
        sizes = (options.ranks_per_member, world.size, 1)
        with DDPEnsGroupStrategy(*sizes, communicator=world, seed=0, average=False) as strategy:
            means = cross_validate(strategy, options.epochs)
    if world.rank > 0:
        return
    shares = {}
    for name, (square, log_likelihood, *coverage) in zip(NAMES, means, strict=True):
        error = np.mean(np.abs(coverage - LEVELS))
        print(f"{name}: RMSE {np.sqrt(square):.1f}, log-likelihood {log_likelihood:.3f}", end="")
        print(f", calibration error {error:.1%}")
        shares[name] = np.array(coverage)
    calibration(options.plot, LEVELS, shares, PATIENTS)


if __name__ == "__main__":
    main()
