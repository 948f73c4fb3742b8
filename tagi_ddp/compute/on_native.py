"""The compute of the backend's own kernels, on numpy arrays and the engine's buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy import empty

from tagi_ddp._backend import SharedStep
from tagi_ddp.checks import FLOAT32, require_whole_samples
from tagi_ddp.compute.interface import LSTMStates, Memory, UpdateMethod
from tagi_ddp.compute.native import build
from tagi_ddp.engine.buffers import FloatArray, HiddenStates, OutputBuffers, delta_states_of
from tagi_ddp.engine.layers import lstm_samples
from tagi_ddp.engine.series import NOT_SMOOTHING, SMOOTHING, smooths
from tagi_ddp.engine.shapes import input_rows
from tagi_ddp.replica import Replica


class NativeCompute:
    """A network of the backend over the engine's memory, in one thread."""

    name: Literal["native"] = "native"
    takes_tensors = False

    def __init__(self, model: Any, replica: Replica, bucket: FloatArray) -> None:
        """Compute ``model``, whose state is ``replica``; ``bucket`` is [means | variances]."""
        self.replica = replica
        self._engine = model._cpp_backend
        self._first = replica.layers[0].handle
        self.bucket = bucket
        self.network = build(self._engine.layers, replica, input_rows(model))
        replica.on_host.place_deltas(bucket)
        self.input_size = self.network.input_size
        self.output_size = self.network.output_size
        self.samples = 0
        #: samples and outputs, by the shape of inputs that are computed here without a new choice
        self.sizes: dict[tuple[int, ...], tuple[int, int]] = {}
        self._smooths = any(type(layer).__name__ in SMOOTHING for layer in self._engine.layers)
        self._buffers: OutputBuffers | None = None
        self._shown = False  # True if the engine's buffers hold the last outputs
        self._computed = False  # True if their innovation is in the network
        self._trained = False  # True if the last forward pass was in training mode
        self._smoothed: tuple[FloatArray, FloatArray] | None = None

    def forward(
        self,
        mean: FloatArray,
        variance: FloatArray | None,
        jacobian: FloatArray | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs; ``jacobian`` is of the activation that computed the inputs."""
        training = self._first.training
        if self._smooths:
            self.network.set_samples(self._engine.num_samples)
        self._shown = self._computed = self._trained = False
        self.samples = 0
        samples = mean.size // self.input_size
        size = samples * self.output_size
        out_mean, out_variance = empty(size, FLOAT32), empty(size, FLOAT32)
        self.network.forward(mean, variance, jacobian, training, out_mean, out_variance)
        self.samples, self._trained = samples, training
        self.sizes[(mean.size,)] = samples, size
        return out_mean, out_variance

    def forward_from(self, inputs: HiddenStates) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs of another network's outputs."""
        require_whole_samples(inputs.mean.size, self.input_size)
        return self.forward(inputs.mean, inputs.variance, inputs.jacobian)

    def register_shape(self, shape: tuple[int, ...]) -> None:
        """Register the shape of the last batch for `learn`."""
        self.sizes[shape] = self.samples, self.samples * self.output_size

    def learn(
        self,
        mean: Any,
        variance: Any,
        mu_obs: Any,
        var_obs: Any,
        selected: Any,
        together: SharedStep | None = None,
    ) -> tuple[tuple[FloatArray, FloatArray], list[int], str] | None:
        """Take a whole step, of all ranks of a host by ``together``; return the outputs before it.

        Returns (means, variances), the ranks with a delta that is NaN or infinite, and this rank's
        first layer with one, or ""; if there are such ranks, no delta was applied. Returns None if
        no batch of this shape is registered, or not in training mode. Raises TypeError unless
        arrays are float32, and int32 for ``selected``, and ValueError for wrong sizes, rows or
        variances. The innovation of the inputs is not computed.
        """
        sizes = self.sizes.get(mean.shape)
        if sizes is None or not self._first.training:
            return None
        if self._smooths:
            self.network.set_samples(self._engine.num_samples)
        self._shown = self._trained = False
        self.samples = 0
        samples, size = sizes
        out_mean, out_variance = empty(size, FLOAT32), empty(size, FLOAT32)
        ranks, culprit = self.network.learn(
            mean, variance, mu_obs, var_obs, selected, out_mean, out_variance, together
        )
        self.samples = samples
        self._computed = self._trained = True
        return (out_mean, out_variance), ranks, culprit

    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Write the deltas; call ``done(0)`` at the end."""
        if not self._trained:
            raise RuntimeError("backward() needs a forward() in training mode; call train() first")
        if not self._computed:
            self.network.take_innovation(self._show().deltas_address)
        self.network.backward(self._engine.input_state_update)
        if done is not None:
            done(0)

    def update_outputs(self, method: UpdateMethod, observations: Mapping[str, Any]) -> None:
        """Compute the innovation and keep it in the network."""
        self.network.update(
            observations["mu_obs"], observations.get("var_obs"), observations.get("selected_idx")
        )
        self._computed = True

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the last outputs, flat."""
        size = self.samples * self.output_size
        if not size:
            raise RuntimeError("there are no outputs before a forward()")
        mean, variance = empty(size, FLOAT32), empty(size, FLOAT32)
        self.network.read_outputs(mean, variance)
        return mean, variance

    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        size = self.samples * self.input_size
        mean, variance = empty(size, FLOAT32), empty(size, FLOAT32)
        self.network.read_input_innovation(mean, variance)
        return mean, variance

    @property
    def output_delta_z_buffer(self) -> Any:
        """The innovation of the last inputs in an object of the engine."""
        return delta_states_of(*self.get_input_states(), self.samples)

    @property
    def output_z_buffer(self) -> Any:
        """The last outputs in an object of the engine; None before the first forward."""
        return self._show().states if self.samples else None

    def set_outputs(self, outputs: HiddenStates) -> None:
        self._show().write_states(outputs.mean, outputs.variance, outputs.jacobian)

    @property
    def input_delta_z_buffer(self) -> Any:
        """The outputs' innovation in an object of the engine; None before the first forward.

        A script may write to it; backward reads it later.
        """
        if not self.samples:
            return None
        buffers = self._show()
        if self._computed:
            self.network.show_innovation(buffers.deltas_address)
            self._computed = False
        return buffers.deltas

    @input_delta_z_buffer.setter
    def input_delta_z_buffer(self, value: Any) -> None:
        self._show().deltas = value
        self._computed = False

    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        innovation = self._show().innovation()
        for view, values in zip(innovation, (delta_mu, delta_var), strict=True):
            view[:] = values
        self._computed = False

    def memory(self) -> Memory:
        states = self.get_lstm_states()
        samples = lstm_samples(self._engine.layers, states)
        return Memory(samples, states, list(self.network.embedding_sums))

    def remember(self, memory: Memory) -> None:
        self.set_lstm_states(memory.lstm, memory.samples)
        for sums, values in zip(self.network.embedding_sums, memory.lasting, strict=True):
            sums[:] = values

    def keep(self) -> None:
        self.network.keep()

    def restore(self) -> None:
        self.network.restore()

    def restore_if(self, refused: Any) -> bool:
        return False

    def reset_lstm_states(self) -> None:
        self.network.reset_lstm_states()

    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        states: LSTMStates = {}
        for index, parts in self.network.get_lstm_states(time_step).items():
            mu_h, var_h, mu_c, var_c = (np.array(part, np.float32) for part in parts)
            states[index] = (mu_h, var_h, mu_c, var_c)
        return states

    def set_lstm_states(self, states: LSTMStates, samples: int | None = None) -> None:
        lists = {
            index: [np.ravel(part).tolist() for part in parts] for index, parts in states.items()
        }
        self.network.set_lstm_states(lists, samples)

    def smoother(self) -> tuple[FloatArray, FloatArray]:
        if not smooths(self._engine.layers):
            raise RuntimeError(NOT_SMOOTHING)
        outputs = self.network.smooth()
        if outputs is None or not outputs[0]:
            raise RuntimeError("smoother() needs a series: call forward() and backward() before")
        mean, variance = outputs
        self._smoothed = np.array(mean, np.float32), np.array(variance, np.float32)
        return self.get_outputs_smoother()

    def get_outputs_smoother(self) -> tuple[FloatArray, FloatArray]:
        if self._smoothed is None:
            raise RuntimeError("there are no smoothed outputs before a smoother()")
        return self._smoothed[0].copy(), self._smoothed[1].copy()

    def _show(self) -> OutputBuffers:
        """Write the last outputs to the engine's buffers, once; return the buffers."""
        if not self.samples:
            raise RuntimeError("there are no outputs before a forward()")
        if self._buffers is None or self._buffers.batch != self.samples:
            self._buffers = OutputBuffers(self.samples, self.output_size)
        if not self._shown:
            self.network.show_outputs(self._buffers.states_address)
            self._shown = True
        return self._buffers
