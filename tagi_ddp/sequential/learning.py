"""A whole training step in one call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp.checks import flat_floats
from tagi_ddp.compute import NativeCompute
from tagi_ddp.compute.interface import UpdateMethod
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.sequential.interface import SequentialInterface
from tagi_ddp.sequential.output_updater import update_outputs
from tagi_ddp.update.not_finite import NotFiniteError, refusal


class LearnInterface(SequentialInterface):
    """`learn`, for what has forward, backward and step."""

    forward: Callable[..., tuple[FloatArray, FloatArray]]
    backward: Callable[[], None]
    step: Callable[[], None]
    _or_abort: Callable[[], AbstractContextManager[None]]
    _require_open: Callable[[], None]
    _steps_alone: bool  # whether a step is the own deltas', capped

    def learn(
        self,
        mu_x: ArrayLike,
        mu_obs: ArrayLike,
        var_obs: ArrayLike | None = None,
        selected_idx: ArrayLike | None = None,
        var_x: ArrayLike | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Train on this rank's share of a batch: forward, output update, backward and step.

        Args:
            mu_x, var_x: the inputs, as for `forward`.
            mu_obs: what was observed, flat or not: a float for each output, for each of
                ``selected_idx``, or, without ``var_obs``, for each two outputs. NaN: nothing.
            var_obs: the variances of the observations' noise, as many, or one number for all.
                None: the noise is unknown, and every second output is its expected variance.
            selected_idx: the numbers of the outputs that were observed, counted from 1, as many
                for each sample, as hierarchical softmax gives them; None: all.

        Returns:
            what `forward` returns: the predictions before the step. `get_input_states` may have
            nothing to tell after it.

        Raises what `forward` and `step` raise, and ValueError where sizes do not fit.
        """
        if var_obs is None and selected_idx is not None:
            raise ValueError("selected_idx needs var_obs, the variances of the observations")
        if isinstance(var_obs, (float, int)):
            var_obs = np.full(np.shape(mu_obs), var_obs, np.float32)
        if self._steps_alone:
            learned = self._learn_alone(mu_x, mu_obs, var_obs, selected_idx, var_x)
            if learned is not None:
                return learned
        outputs = self.forward(mu_x, var_x)
        observations: dict[str, ArrayLike] = {"mu_obs": mu_obs}
        method: UpdateMethod = "update_heteros"
        if var_obs is not None:
            observations["var_obs"], method = var_obs, "update"
        if selected_idx is not None:
            observations["selected_idx"], method = selected_idx, "update_using_indices"
        with self._or_abort():
            update_outputs(self, method, observations)
        self.backward()
        self.step()
        return outputs

    def _learn_alone(
        self,
        mu_x: ArrayLike,
        mu_obs: ArrayLike,
        var_obs: ArrayLike | None,
        selected_idx: ArrayLike | None,
        var_x: ArrayLike | None,
    ) -> tuple[FloatArray, FloatArray] | None:
        """Learn in one call of the backend; return None where that cannot be.

        There are no other ranks to tell of an error.
        """
        self._require_open()
        mean = mu_x
        if type(mean) is not np.ndarray:
            mean = flat_floats("mu_x", mu_x, self._by_batch is not None)
        by_batch = self._by_batch
        if by_batch is not None and mean.size != by_batch.size and len(mean):
            self.compute = by_batch(mean)
        compute = self.compute
        if not isinstance(compute, NativeCompute) or self._accumulation.adds:
            return None
        try:
            arrays: Any = var_x, mu_obs, var_obs, selected_idx
            learned = compute.learn(mean, *arrays)
        except TypeError:  # not arrays that the backend takes as they are
            learned = compute.learn(
                flat_floats("mu_x", mean, False),
                None if var_x is None else flat_floats("var_x", var_x, False),
                flat_floats("mu_obs", mu_obs, False),
                None if var_obs is None else flat_floats("var_obs", var_obs, False),
                None if selected_idx is None else np.ascontiguousarray(selected_idx, np.int32),
            )
        if learned is None:
            return None
        mean_out, variance_out, culprit = learned
        self._accumulation.forwarded = self._accumulation.samples = None
        if culprit:
            raise NotFiniteError(refusal("step", [0], culprit), [0])
        return mean_out, variance_out
