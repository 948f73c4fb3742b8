"""Compare the errors of batches, and rules that find a batch too large, some at the first step.

``python -m benchmarks.settings`` trains networks of several sizes on eight sets, with batches and
noises of all sizes; docs/training.md shows what it prints. One process, and no other to compare
with: it is no family of `benchmarks`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytagi
from pytagi.nn import Linear, ReLU, Sequential
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    make_friedman1,
    make_friedman2,
    make_friedman3,
    make_swiss_roll,
)

from tagi_ddp import accelerate, progress

ROWS, TEST = 2000, 1000
BATCHES = (1, 4, 16, 64, 256, 1024)
NOISES = (0.05, 0.2, 0.5)  # in standard deviations of the targets
NETWORKS = ((30,), (100,), (300,), (50, 50), (100, 100, 100))
BAD = 1.5  # times the error of the best batch, with the same set, network and noise


def ripples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (ROWS + TEST, 2))
    return x, np.sin(2 * x[:, 0]) * x[:, 1] + rng.normal(0, 0.2, len(x))


def wave() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS + TEST, 8))
    return x, np.sin(x.sum(axis=1)) + rng.normal(0, 0.1, len(x))


SETS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "ripples": ripples,
    "wave": wave,
    "friedman1": lambda: make_friedman1(ROWS + TEST, noise=1, random_state=0),
    "friedman2": lambda: make_friedman2(ROWS + TEST, noise=60, random_state=0),
    "friedman3": lambda: make_friedman3(ROWS + TEST, noise=0.1, random_state=0),
    "swiss roll": lambda: make_swiss_roll(ROWS + TEST, noise=0.3, random_state=0),
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "breast cancer": lambda: load_breast_cancer(return_X_y=True),
}


@dataclass
class Run:
    """One training: its settings, and what is known after the first step and at the end."""

    name: str
    network: tuple[int, ...]
    noise: float
    batch: int
    pull: float  # batch * variance / (variance + noise^2), of the first outputs
    negative: float  # share of the weights whose variance the first step found not positive
    error: float = np.nan  # RMSE in standard deviations of the targets
    bad: bool = False


def load(name: str) -> tuple[np.ndarray, ...]:
    """Return inputs and targets, standardised, for training and testing."""
    x, y = SETS[name]()
    order = np.random.default_rng(0).permutation(len(x))
    rows = min(ROWS, 2 * len(x) // 3)
    parts = []
    for array in (x, y.reshape(-1, 1)):
        array = np.asarray(array, float)[order]
        known = array[:rows]
        scaled = ((array - known.mean(0)) / known.std(0)).astype(np.float32)
        parts += [scaled[:rows], scaled[rows:]]
    return tuple(parts)


def train(data: tuple[np.ndarray, ...], run: Run, epochs: int) -> None:
    x, test_x, y, test_y = data
    pytagi.manual_seed(0)
    layers, width = [], x.shape[1]
    for hidden in run.network:
        layers += [Linear(width, hidden), ReLU()]
        width = hidden
    model = accelerate(Sequential(*layers, Linear(width, 1)), compute="native")
    weights = sum(len(parts[0]) for parts in model.state_dict().values())
    rng = np.random.default_rng(0)
    for epoch in range(epochs):
        order = rng.permutation(len(x))
        for begin in range(0, len(x), run.batch):
            part = order[begin : begin + run.batch]
            _, variance = model.learn(x[part], y[part], run.noise**2)
            if epoch == begin == 0:
                spread = float(variance.mean())
                run.pull = len(part) * spread / (spread + run.noise**2)
                run.negative = sum(model.get_neg_var_w_counter().values()) / weights
    mean, _ = model.predict(test_x)
    run.error = float(np.sqrt(np.mean((test_y - mean) ** 2)))


def report(runs: list[Run]) -> None:
    best: dict[tuple[object, ...], float] = defaultdict(lambda: np.inf)
    for run in runs:
        key = run.name, run.network, run.noise
        best[key] = min(best[key], run.error)
    ratios = defaultdict(list)
    for run in runs:
        ratio = run.error / best[run.name, run.network, run.noise]
        run.bad = not ratio <= BAD
        ratios[run.batch].append(ratio)
    print("batch: error in those of the best batch, median and worst tenth; share above 1.5")
    for batch, found in ratios.items():
        median, tenth = np.quantile(found, (0.5, 0.9))
        print(f"{batch:5}  {median:5.2f} {tenth:6.2f} {np.mean(np.array(found) > BAD):5.0%}")
    rules: dict[str, Callable[[Run], bool]] = {
        "batch >= 64": lambda run: run.batch >= 64,
        "batch >= 256, noise <= 0.2": lambda run: run.batch >= 256 and run.noise <= 0.2,
        "batch S / (S + noise^2) >= 100": lambda run: run.pull >= 100,
        "batch S / (S + noise^2) >= 400": lambda run: run.pull >= 400,
        "negative variances >= 5 %": lambda run: run.negative >= 0.05,
        "negative variances >= 10 %": lambda run: run.negative >= 0.1,
    }
    bad = sum(run.bad for run in runs)
    print(f"rule: alarms, false ones; missed of {bad} bad runs, of {len(runs)}")
    for name, rule in rules.items():
        alarms = [run for run in runs if rule(run)]
        right = sum(run.bad for run in alarms)
        print(f"{name:32} {len(alarms):4} {len(alarms) - right:4} {bad - right:4}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.settings", description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--output", type=Path, default=Path("build/settings.json"))
    options = parser.parse_args()
    runs = []
    for name in progress(options.sets, unit="set"):
        data = load(name)
        for network in NETWORKS:
            for noise in NOISES:
                for batch in BATCHES:
                    runs.append(Run(name, network, noise, batch, 0, 0))
                    train(data, runs[-1], options.epochs)
    report(runs)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main()
