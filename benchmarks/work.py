"""A training step by our interface, which is pytagi's; the same data for all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pytagi import Utils
from pytagi.nn import OutputUpdater, Sequential

from tagi_ddp import DDPSequential

CLASSES = 10


def data(inputs: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch that is the same for all: samples, [batch, inputs], and labels."""
    generator = np.random.default_rng(0)
    samples = generator.standard_normal((batch, inputs), np.float32)
    return samples, generator.integers(CLASSES, size=batch)


def trainer(
    model: Sequential | DDPSequential, samples: np.ndarray, labels: np.ndarray
) -> Callable[[], None]:
    """Return a step on a batch: forward, output update, backward, step."""
    targets, nodes, _ = Utils().label_to_obs(labels, CLASSES)
    variances = np.ones(targets.size, np.float32)
    updater = OutputUpdater("cpu")

    def train() -> None:
        model(samples)
        updater.update_using_indices(
            model.output_z_buffer, targets, variances, nodes, model.input_delta_z_buffer
        )
        model.backward()
        model.step()

    return train
