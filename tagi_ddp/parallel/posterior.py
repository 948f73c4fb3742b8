"""Statistics of the posterior of a TAGI network, layer by layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.parallel.callbacks import Callback, Metrics, Trainer
from tagi_ddp.replica import Replica
from tagi_ddp.replica.host import attach
from tagi_ddp.sequential.interface import SequentialInterface
from tagi_ddp.update.merging import Merging

_ROUNDING = 1e-3  # tolerance of a step, relative to the cap


class PosteriorStatistics(Callback):
    """A callback that adds statistics of the posterior to an epoch's metrics.

    For each layer, by its name as in "0 (Linear(8,64))":

    - "mean_abs_mu", "mean_var": the means of |mean| and of variance over weights and biases.
    - "capped": the share of parameters that the epoch's last step moved as far as the cap allows,
      sqrt(variance) / cap factor. A share that stays large means that the noise is set too low. It
      is left out if ranks merge posteriors.
    - "negative_variances": the number of the weights' variances that were not positive in the step.
    - "agreement": if ranks merge posteriors, the similarity of their changes at the last merge; see
      `DDPSequential.get_merge_agreement`.

    Raises TypeError for a model that is no TAGI network.
    """

    def __init__(self) -> None:
        self._before: NDArray[np.float32] | None = None
        self._samples = 0

    def on_before_step(self, trainer: Trainer, samples: int, last: bool) -> None:
        if last and _merging(trainer) is None:
            self._before, self._samples = _gaussians(_replica(trainer)), samples

    def on_epoch_end(self, trainer: Trainer, metrics: Metrics) -> None:
        replica, merging = _replica(trainer), _merging(trainer)
        gaussians = _gaussians(replica)
        negative = replica.parameters.negative_variances
        caps, moved = replica.on_host.cap_factors(self._samples), None
        if self._before is not None:
            moved = np.abs(gaussians - self._before) / np.sqrt(self._before[1])
            self._before = None
        blocks = replica.parameters.blocks
        for index, layer in enumerate(replica.layers):
            (begin, weights), (_, biases) = blocks[2 * index : 2 * index + 2]
            own = slice(begin, begin + weights + biases)
            metrics[f"{layer.name}/mean_abs_mu"] = float(np.abs(gaussians[0, own]).mean())
            metrics[f"{layer.name}/mean_var"] = float(gaussians[1, own].mean())
            if moved is not None:
                bar = (1 - _ROUNDING) / caps[index]
                metrics[f"{layer.name}/capped"] = float((moved[:, own] >= bar).any(0).mean())
            metrics[f"{layer.name}/negative_variances"] = negative[index]
            if merging is not None:
                metrics[f"{layer.name}/agreement"] = merging.agreement[index]


def _replica(trainer: Trainer) -> Replica:
    model = getattr(trainer.task_model, "model", None)
    if isinstance(model, SequentialInterface):
        return model._local.replica
    if not hasattr(model, "_cpp_backend"):
        raise TypeError(f"PosteriorStatistics needs a TAGI network, got a {type(model).__name__}")
    return attach(model)


def _merging(trainer: Trainer) -> Merging | None:
    ranks = getattr(getattr(trainer.task_model, "model", None), "_ranks", None)
    exchange = getattr(ranks, "exchange", None)
    return exchange if isinstance(exchange, Merging) else None


def _gaussians(replica: Replica) -> NDArray[np.float32]:
    """Return means and variances of all parameters, [2, size]."""
    replica.pull()
    gaussians = np.zeros(2 * replica.parameters.size, np.float32)
    replica.parameters.read_posterior(gaussians)
    return gaussians.reshape(2, -1)
