"""Forward and backward by the backend's own kernels, between numpy arrays and the engine's buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp.checks import flat_floats
from tagi_ddp.compute.interface import LSTMStates, UpdateMethod
from tagi_ddp.compute.native import SMOOTHING, build
from tagi_ddp.engine.buffers import FloatArray, OutputBuffers
from tagi_ddp.replica.protocol import Replica


class NativeCompute:
    """A network of the backend over the engine's memory, in one thread."""

    name: Literal["native"] = "native"
    updater_device = "cpu:0"

    def __init__(self, model: Any, replica: Replica, bucket: FloatArray) -> None:
        """Compute ``model``, whose state is ``replica``; write deltas, [means | variances]."""
        self.replica = replica
        self._engine = model._cpp_backend
        self._first = model._cpp_backend.layers[0]
        self.network = build(model, replica)
        assert replica.memory is not None
        replica.memory.place_deltas(bucket)
        self._smooths = any(type(layer).__name__ in SMOOTHING for layer in self._engine.layers)
        self._buffers: OutputBuffers | None = None
        self._shown = False  # whether the engine's buffers show the last outputs
        self._computed = False  # whether their innovation is in the network
        self._trained = False  # whether the last forward pass was one for training

    @property
    def samples(self) -> int:
        return self.network.samples

    @property
    def output_size(self) -> int:
        return self.network.output_size

    def forward(
        self, mean: FloatArray, variance: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs."""
        self.replica.pull()
        training = self._first.training
        if self._smooths:
            self.network.set_samples(self._engine.num_samples)
        self.network.forward(mean, variance, training)
        self._shown = self._computed = False
        self._trained = training
        return self.get_outputs()

    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Write the deltas; tells of all at once."""
        if not self._trained:
            raise RuntimeError("backward() needs a forward() in training mode; call train() first")
        self.replica.pull()
        if not self._computed:
            self.network.take_innovation(self._show().deltas_address)
        self.network.backward(self._engine.input_state_update)
        if done is not None:
            done(0)

    def update_outputs(self, method: UpdateMethod, observations: Mapping[str, ArrayLike]) -> None:
        """Compute the innovation, and leave it in the network."""
        arrays = dict(observations)
        selected = arrays.pop("selected_idx", None)
        if selected is not None:
            selected = np.ascontiguousarray(selected, np.int32)
        mu, *var = (flat_floats(name, value, False) for name, value in arrays.items())
        self.network.update(mu, var[0] if var else None, selected)
        self._computed = True

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the last outputs, flat."""
        size = self.network.samples * self.network.output_size
        if not size:
            raise RuntimeError("there are no outputs before a forward()")
        mean, variance = np.empty(size, np.float32), np.empty(size, np.float32)
        self.network.read_outputs(mean, variance)
        return mean, variance

    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        size = self.network.samples * self.network.input_size
        mean, variance = np.empty(size, np.float32), np.empty(size, np.float32)
        self.network.read_input_innovation(mean, variance)
        return mean, variance

    @property
    def output_z_buffer(self) -> Any:
        """The last outputs in an object of the engine; None before the first forward."""
        return self._show().states if self.samples else None

    @output_z_buffer.setter
    def output_z_buffer(self, value: Any) -> None:
        self._show().states = value

    @property
    def input_delta_z_buffer(self) -> Any:
        """The outputs' innovation in an object of the engine; None before the first forward.

        A script may write there, so that backward takes what is there then.
        """
        if not self.samples:
            return None
        self._computed = False
        return self._show().deltas

    @input_delta_z_buffer.setter
    def input_delta_z_buffer(self, value: Any) -> None:
        self._show().deltas = value
        self._computed = False

    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        self.network.set_innovation(delta_mu, delta_var)
        self._computed = True

    def set_threads(self, count: int) -> None:
        """Do nothing: all is done in the caller's thread."""

    def reset_lstm_states(self) -> None:
        self.network.reset_lstm_states()

    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        states: LSTMStates = {}
        for index, parts in self.network.get_lstm_states(time_step).items():
            mu_h, var_h, mu_c, var_c = (np.array(part, np.float32) for part in parts)
            states[index] = (mu_h, var_h, mu_c, var_c)
        return states

    def set_lstm_states(self, states: LSTMStates) -> None:
        self.network.set_lstm_states(
            {index: [np.ravel(part).tolist() for part in parts] for index, parts in states.items()}
        )

    def _show(self) -> OutputBuffers:
        """Write the last outputs to the engine's buffers, once; return the buffers."""
        batch, width = self.network.samples, self.network.output_size
        if not batch:
            raise RuntimeError("there are no outputs before a forward()")
        if self._buffers is None or (self._buffers.batch, self._buffers.width) != (batch, width):
            self._buffers = OutputBuffers(batch, width)
        if not self._shown:
            self.network.show_outputs(self._buffers.states_address)
            self._shown = True
        return self._buffers
