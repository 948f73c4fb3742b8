"""Search hyperparameters by Optuna, with trials side by side on all ranks.

pip install '.[trackers]'
tagi-ddp run -n 2 examples/search.py

Each rank has a study of its own with the same seed. All studies are told the same results, so they
ask for the same trials, and no rank needs another's study.
"""

import argparse

import numpy as np
import optuna
import pytagi
from pytagi.nn import Linear, ReLU, Sequential
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

from tagi_ddp import accelerate, log, map_networks

AT_ONCE = 4  # trials between two answers to the studies, the same for any number of ranks


def distributions():
    return {
        "width": optuna.distributions.IntDistribution(4, 128, log=True),
        "noise": optuna.distributions.FloatDistribution(0.2, 2.0, log=True),
        "epochs": optuna.distributions.IntDistribution(1, 20),
    }


def negative_log_likelihood(settings):
    """Train on two thirds of the patients; return the loss on the others."""
    x, y = load_diabetes(return_X_y=True)
    x, y = scale(x).astype("float32"), scale(y).astype("float32")[:, None]
    held = np.arange(len(x)) % 3 == 0
    pytagi.manual_seed(0)
    network = Sequential(Linear(10, settings["width"]), ReLU(), Linear(settings["width"], 1))
    variance = settings["noise"] ** 2
    with accelerate(network) as model:
        for epoch in range(settings["epochs"]):
            order = np.random.default_rng(epoch).permutation(np.flatnonzero(~held))
            for batch in np.array_split(order, len(order) // 16):
                model.learn(x[batch], y[batch], variance)
        mean, variances = model.predict(x[held], variance)
    square = (y[held] - mean) ** 2
    return float(np.mean(square / variances + np.log(2 * np.pi * variances)) / 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=40)
    trials = parser.parse_args().trials
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    for begin in range(0, trials, AT_ONCE):
        asked = [study.ask(distributions()) for _ in range(min(AT_ONCE, trials - begin))]
        losses = map_networks(negative_log_likelihood, [trial.params for trial in asked])
        for trial, loss in zip(asked, losses, strict=True):
            study.tell(trial, loss)
    log(f"loss {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
