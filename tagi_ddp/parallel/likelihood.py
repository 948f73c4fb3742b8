"""The loss of a TAGI network: the negative log-likelihood of observations of its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tagi_ddp.data.metrics import gaussian_log_density
from tagi_ddp.sequential.interface import SequentialInterface
from tagi_ddp.sequential.output_updater import OutputUpdater


class GaussianLoss:
    """Observations of a network's outputs with Gaussian noise, as a loss that has ``backward()``.

    Its value is the negative logarithm of the observations' density, N(mean, variance of the output
    + variance of the noise), a mean over samples. Backward is the exact inference of the outputs
    from the observations, and then of the network, layer by layer: tractable approximate Gaussian
    inference (Goulet, Nguyen and Amiri, JMLR 22, 2021). It belongs to the last forward pass.

    Args:
        model: a DDPSequential, what `accelerate` returns, or a pytagi Sequential.
        output: means and variances of the outputs, as the model has returned them.
        targets: observations, [batch, outputs], or [batch] of one output; NaN is no observation.
        variance: that of the observations' noise: one number, or one for each observation.

    Raises:
        ValueError: naming the argument, what it got and what it takes.
    """

    def __init__(
        self, model: Any, output: tuple[Any, Any], targets: Any, variance: ArrayLike
    ) -> None:
        self._model = model
        self._mean, self._variance = output
        self._targets = targets
        count = _flat(targets).size
        if count != len(self._mean):
            raise ValueError(
                f"targets must have one element for each of {len(self._mean)} outputs, got {count}"
            )
        noise = _flat(variance)
        if noise.size not in (1, count) or not np.all(noise > 0):
            raise ValueError(
                f"variance must be a positive number, or one for each observation, got {variance!r}"
            )
        self._noise = np.array(np.broadcast_to(noise, count))

    def item(self) -> float:
        """Return the mean over this rank's samples; 0 without any, NaN if an output is NaN."""
        targets = _flat(self._targets)
        spread = _flat(self._variance).astype(np.float64) + self._noise
        densities = gaussian_log_density(targets, _flat(self._mean), spread)
        densities[np.isnan(targets)] = 0
        return (0.0 - float(densities.sum())) / max(len(self._targets), 1)  # never -0.0

    __float__ = item

    def backward(self) -> None:
        """Compute the deltas that the model's step applies."""
        model = self._model
        if isinstance(model, SequentialInterface):
            OutputUpdater(model).update(self._targets, self._noise)
        elif len(self._noise):
            from pytagi.nn import OutputUpdater as EngineUpdater

            updater = EngineUpdater(model.device)
            updater.update(
                output_states=model.output_z_buffer,
                mu_obs=_flat(self._targets),
                var_obs=self._noise,
                delta_states=model.input_delta_z_buffer,
            )
        model.backward()


def _flat(value: Any) -> NDArray[np.float32]:
    """Return a flat array on the host."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value, np.float32).reshape(-1)
