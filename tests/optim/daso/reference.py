"""DASO in plain numpy, all ranks in one process: slow, without casts, changes or communication."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.optim import SyncSchedule

Array = npt.NDArray[np.float64]

RATE, MOMENTUM = 0.05, 0.8
INPUTS, OUTPUTS, SAMPLES = 5, 3, 4


def draw(*seed: int) -> Array:
    """Return numbers that depend on nothing but the seed."""
    return np.random.default_rng(seed).normal(size=(SAMPLES, INPUTS + OUTPUTS))


def begin() -> tuple[Array, Array]:
    """Return the weights and the biases of a linear layer."""
    generator = np.random.default_rng(9)
    return generator.normal(size=(OUTPUTS, INPUTS)), generator.normal(size=OUTPUTS)


class Rank:
    """A linear layer, and SGD with momentum on its mean squared error."""

    def __init__(self) -> None:
        weights, biases = begin()
        self.x = np.concatenate([weights.ravel(), biases])
        self.velocity = np.zeros_like(self.x)

    def gradient(self, data: Array) -> Array:
        inputs, targets = data[:, :INPUTS], data[:, INPUTS:]
        weights = self.x[: OUTPUTS * INPUTS].reshape(OUTPUTS, INPUTS)
        error = inputs @ weights.T + self.x[OUTPUTS * INPUTS :] - targets
        scale = 2 / error.size
        return scale * np.concatenate([(error.T @ inputs).ravel(), error.sum(0)])

    def step(self, gradient: Array) -> None:
        self.velocity = MOMENTUM * self.velocity + gradient
        self.x = self.x - RATE * self.velocity


def trace(
    nodes: int, size: int, losses: list[float], batches: int, weight: float, **arguments: Any
) -> Array:
    """Return what every rank holds after every batch: [batch, rank, parameter]."""
    schedule = SyncSchedule(len(losses), **arguments)
    grid = [[Rank() for _ in range(size)] for _ in range(nodes)]
    everyone = [rank for node in grid for rank in node]
    copies: list[Array] = []
    apart = False
    found = []
    for epoch, loss in enumerate(losses):
        for batch in range(batches):
            sync = schedule.after(batch, batches)
            together = sync.local or sync.blocking or nodes == 1
            for i, node in enumerate(grid):
                own = [
                    rank.gradient(draw(epoch, batch, i * size + j)) for j, rank in enumerate(node)
                ]
                mean = np.mean(own, axis=0)
                for rank, gradient in zip(node, own, strict=True):
                    rank.step(mean if together else gradient)
            apart = apart or not together
            if together and apart:
                for node in grid:
                    mean = np.mean([rank.x for rank in node], axis=0)
                    for rank in node:
                        rank.x = mean
            if nodes > 1 and sync.merge:
                own_weight = weight * sync.merge
                for rank in everyone:
                    rank.x = (own_weight * rank.x + sum(copies)) / (own_weight + nodes)
            if sync.send is not None:
                copies = [node[sync.send % len(node)].x for node in grid]
            if nodes > 1 and sync.blocking:
                mean = np.mean([node[0].x for node in grid], axis=0)
                for rank in everyone:
                    rank.x = mean
            found.append([rank.x for rank in everyone])
        schedule.end_epoch(loss)
    return np.array(found)
