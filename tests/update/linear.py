"""Linear-Gaussian regression whose exact posterior is known, by any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tagi_ddp import DDPSequential

INPUTS, NOISE = 16, 2.0


@dataclass(frozen=True)
class Samples:
    """Each looks at one weight: y = scale * w[index] + noise."""

    index: np.ndarray
    scale: np.ndarray
    y: np.ndarray

    def x(self) -> np.ndarray:
        x = np.zeros((self.index.size, INPUTS), np.float32)
        x[np.arange(self.index.size), self.index] = self.scale
        return x


def samples(rank: int, step: int, spread: float = 1.0) -> Samples:
    """A batch of a rank, of another size on each; no weight twice, so that TAGI is exact.

    The larger the ``spread`` of the inputs, the more a sample tells of its weight, and the smaller
    that is.
    """
    rng = np.random.default_rng([rank, step])
    index = rng.permutation(INPUTS)[: (3 * rank + step) % (INPUTS + 1)]
    scale, noise = rng.uniform(-1, 1, (2, index.size))
    scale *= spread
    y = np.sin(index + 1.0) * scale / spread + NOISE * noise
    return Samples(index, scale.astype(np.float32), y.astype(np.float32))


def network() -> Any:
    from pytagi import manual_seed
    from pytagi.nn import Linear, Sequential

    manual_seed(7)
    return Sequential(Linear(INPUTS, 1, bias=False))


def weights(model: DDPSequential) -> tuple[np.ndarray, np.ndarray]:
    [(mu, var, *_)] = model.state_dict().values()
    return np.array(mu), np.array(var)


def learn(model: DDPSequential, batch: Samples) -> None:
    from pytagi.nn import OutputUpdater

    model(batch.x())
    if batch.y.size:
        OutputUpdater("cpu").update(
            model.output_z_buffer,
            batch.y,
            np.full(batch.y.size, NOISE**2, np.float32),
            model.input_delta_z_buffer,
        )
    model.backward()
    model.step()


def closed_form(
    mu: np.ndarray, var: np.ndarray, batches: list[Samples]
) -> tuple[np.ndarray, np.ndarray]:
    """The posterior of all batches, in float64."""
    precision = 1 / var
    weighted = mu / var
    for batch in batches:
        scale = batch.scale.astype(np.float64)
        np.add.at(precision, batch.index, scale**2 / NOISE**2)
        np.add.at(weighted, batch.index, scale * batch.y / NOISE**2)
    return weighted / precision, 1 / precision


def distance(model: DDPSequential, exact: tuple[np.ndarray, np.ndarray]) -> float:
    """The largest error: of a mean in standard deviations, of a variance relative to itself."""
    mu, var = weights(model)
    off_mean = np.abs(mu - exact[0]) / np.sqrt(exact[1])
    return float(max(off_mean.max(), np.abs(var / exact[1] - 1).max()))
