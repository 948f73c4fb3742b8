"""A rank of an elastic job that something happens to: ``elastic_rank.py FOLDER KIND STEPS``.

It tells what it does, line by line, in a file of its own, and goes slowly until there is a file
"hurry", and more slowly near the end. Some ranks that take the place of others have another network
and must be refused.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from chaos.checkpointed import train
from pytagi import manual_seed
from pytagi.nn import Linear, ReLU, Sequential

from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler

SUMS: dict[str, Any] = {"average": False}
MERGES: dict[str, Any] = {"reduction": "precision", "sync_every": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums over shm": ("shm", SUMS),
    "sums over gloo": ("gloo", SUMS),
    "merges, k = 8, over shm": ("shm", MERGES),
    "merges, k = 8, over gloo": ("gloo", MERGES),
}
PATIENCE = 1.0  # seconds
# Enough for what is learned to depend little on the order of the data: by 0.001.
SAMPLES, BATCH, NOISE = 16_000, 32, 0.3
EPOCH = SAMPLES // BATCH
PACE, LAST, SLOWLY = 0.005, 400, 0.05
EVERY = 5  # steps between two checkpoints
STRANGERS = 0.1  # of the ranks that take the place of others


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and noisy targets."""
    random = np.random.default_rng(seed)
    x = random.uniform(-2, 2, (count, 3)).astype(np.float32)
    y = np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:] / 2
    return x, (y + NOISE * random.standard_normal(y.shape)).astype(np.float32)


def negative_log_likelihood(model: Any) -> float:
    """Return that of unseen samples, their mean."""
    x, y = samples(2000, 1)
    mean, variance = (part.reshape(y.shape) for part in model(x.ravel()))
    total = variance + NOISE**2
    return float(np.mean((y - mean) ** 2 / total + np.log(2 * np.pi * total)) / 2)


def train_all(model: Any, folder: Path, steps: int, tell: Any) -> None:
    """Make all steps, and tell of each and of changes of the group."""
    x, y = samples(SAMPLES, 0)
    changes = 0
    hurry = folder / "hurry"

    def learn(step: int, share: Any) -> None:
        nonlocal changes
        if not hurry.exists():
            time.sleep(SLOWLY if step > steps - LAST else PACE)
        model.learn(x[share], y[share], NOISE**2)
        for change in model.changes[changes:]:
            tell(change=vars(change))
        changes = len(model.changes)

    loop = DistributedSampler(len(x), 1, 0), BATCH, steps // EPOCH
    train(model, folder, loop, learn, tell, EVERY, keep=3)


def main() -> None:
    """Train, and tell of it."""
    folder, (backend, options), steps = Path(sys.argv[1]), KINDS[sys.argv[2]], int(sys.argv[3])
    with open(folder / f"{os.getpid()}.jsonl", "a", buffering=1) as file:

        def tell(**what: Any) -> None:
            file.write(json.dumps({"time": time.monotonic(), **what}) + "\n")

        first = not (folder / os.environ["RANK"]).exists()
        (folder / os.environ["RANK"]).touch()
        stranger = not first and random.random() < STRANGERS
        tell(began=int(os.environ["RANK"]), stranger=stranger)
        manual_seed(1)
        width = 63 if stranger else 64
        network = Sequential(Linear(3, width), ReLU(), Linear(width, 1))
        config = DDPConfig.from_env(backend)
        with DDPSequential(network, config, elastic=PATIENCE, **options) as model:
            train_all(model, folder, steps, tell)
            tell(
                hash=model.check_replicas(),
                steps=model.steps_made,
                nll=negative_log_likelihood(model),
            )


if __name__ == "__main__":
    main()
