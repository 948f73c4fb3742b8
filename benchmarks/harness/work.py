"""A training step by our interface, which is pytagi's; the same data for all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pytagi.nn import OutputUpdater, Sequential

from examples.images import ImageData
from tagi_ddp import DDPSequential
from tagi_ddp.data import ClassTree

CLASSES = 10
TREE = ClassTree(CLASSES)


def data(inputs: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch that is the same for all: samples, [batch, inputs], and labels."""
    generator = np.random.default_rng(0)
    samples = generator.standard_normal((batch, inputs), np.float32)
    return samples, generator.integers(CLASSES, size=batch)


def trainer(
    model: Sequential | DDPSequential, samples: np.ndarray, labels: np.ndarray
) -> Callable[[], None]:
    """Return a step on a batch: forward, output update, backward, step."""
    targets, nodes = (part.ravel() for part in TREE.decisions(labels))
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


class ImageTask:
    """Training steps on shares of images, by hierarchical softmax."""

    def __init__(self, data: ImageData, sigma_v: float = 1.0) -> None:
        self._data = data
        self._targets, self._nodes = TREE.decisions(data.y_train)
        self._variance = sigma_v**2
        self._updater = OutputUpdater("cpu")

    def step(self, model: DDPSequential, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Train on the images with these indices; return the outputs."""
        outputs = model(self._data.x_train[share])
        targets = self._targets[share].ravel()
        self._updater.update_using_indices(
            model.output_z_buffer,
            targets,
            np.full(targets.size, self._variance, np.float32),
            self._nodes[share].ravel(),
            model.input_delta_z_buffer,
        )
        model.backward()
        model.step()
        return outputs
