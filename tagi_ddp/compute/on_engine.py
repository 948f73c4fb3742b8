"""Forward and backward by the engine's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tagi_ddp.checks import require_whole_samples
from tagi_ddp.compute.interface import LSTMStates, UpdateMethod
from tagi_ddp.engine.buffers import FloatArray, Shown
from tagi_ddp.engine.layers import input_size_of
from tagi_ddp.replica.protocol import Replica


class EngineCompute:
    """The model's own forward and backward."""

    name: Literal["engine"] = "engine"
    takes_tensors = False

    def __init__(self, model: Any, replica: Replica) -> None:
        """Compute ``model``, whose state is ``replica``; ValueError if the engine would crash."""
        first = model._cpp_backend.layers[0]
        self._width = input_size_of(first)
        if not self._width:
            raise ValueError(
                f"the engine cannot compute a network that begins with a {type(first).__name__}, "
                'which tells no size of its inputs: use compute="torch"'
            )
        self.replica = replica
        self._model = model
        self._updater: Any = None  # pytagi's OutputUpdater
        self._trained = False  # whether the last forward pass was one for training
        self.input_size = 0
        self._room = 0  # input elements for which the engine has buffers

    @property
    def samples(self) -> int:
        return int(self._model._cpp_backend.z_buffer_block_size)

    @property
    def output_size(self) -> int:
        return int(self._model.output_z_buffer.actual_size)

    def forward(
        self, mean: FloatArray, variance: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Call the model's forward."""
        first = self._model._cpp_backend.layers[0]
        # A recurrent layer's input is a sequence whose length the engine checks itself.
        require_whole_samples(mean.size, self._width)
        self._make_room(mean.size)
        try:
            outputs: tuple[FloatArray, FloatArray] = self._model.forward(mean, variance)
        except RuntimeError as error:
            raise ValueError(
                f"the network refused mu_x with {mean.size} elements: {error}"
            ) from error
        self._room = max(self._room, mean.size)
        self.input_size = mean.size // self.samples
        self._trained = bool(first.training)
        return outputs

    def forward_from(self, inputs: Shown) -> tuple[FloatArray, FloatArray]:
        """Call the engine's forward of hidden states."""
        first = self._model._cpp_backend.layers[0]
        self._make_room(inputs.mean.size)
        self._model._cpp_backend.forward(inputs.states, None)
        self._room = max(self._room, inputs.mean.size)
        self._trained = bool(first.training)
        return self.get_outputs()

    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Call the model's backward, which tells nothing before its end."""
        if not self._trained:
            raise RuntimeError("backward() needs a forward() in training mode; call train() first")
        self._model.backward()
        if done is not None:
            done(0)

    def update_outputs(self, method: UpdateMethod, observations: Mapping[str, Any]) -> None:
        """Call that method of pytagi's OutputUpdater."""
        if self._updater is None:
            from pytagi.nn import OutputUpdater

            self._updater = OutputUpdater("cpu:0")
        getattr(self._updater, method)(
            output_states=self.output_z_buffer,
            delta_states=self.input_delta_z_buffer,
            **observations,
        )

    @property
    def output_z_buffer(self) -> Any:
        """The last outputs."""
        return self._model.output_z_buffer

    @output_z_buffer.setter
    def output_z_buffer(self, value: Any) -> None:
        self._model.output_z_buffer = value

    @property
    def input_delta_z_buffer(self) -> Any:
        """Their innovation."""
        return self._model.input_delta_z_buffer

    @input_delta_z_buffer.setter
    def input_delta_z_buffer(self, value: Any) -> None:
        self._model.input_delta_z_buffer = value

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return the last outputs; RuntimeError before the first forward, where the engine dies."""
        if not self.samples:
            raise RuntimeError("there are no outputs before a forward()")
        outputs: tuple[FloatArray, FloatArray] = self._model.get_outputs()
        return outputs

    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        innovation: tuple[FloatArray, FloatArray] = self._model.get_input_states()
        return innovation

    @property
    def output_delta_z_buffer(self) -> Any:
        """The innovation of the last inputs, if it was computed."""
        return self._model._cpp_backend.output_delta_z_buffer

    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        # The engine replaces its buffer, which is for the widest layer, by what it is given.
        room = np.zeros((2, self._model.input_delta_z_buffer.size), np.float32)
        room[:, : delta_mu.size] = delta_mu, delta_var
        self._model.set_delta_z(*room)

    def set_threads(self, count: int) -> None:
        """Set the engine's threads."""
        self._model.set_threads(count)

    def get_lasting_deltas(self) -> list[FloatArray]:
        return [
            np.concatenate([layer.handle.delta_mu_w, layer.handle.delta_var_w], dtype=np.float32)
            for layer in self.replica.layers
            if layer.accumulates
        ]

    def set_lasting_deltas(self, deltas: Sequence[FloatArray]) -> None:
        layers = [layer for layer in self.replica.layers if layer.accumulates]
        for layer, values in zip(layers, deltas, strict=True):
            mean, variance = np.split(values, 2)
            layer.handle.delta_mu_w, layer.handle.delta_var_w = mean.tolist(), variance.tolist()

    def reset_lstm_states(self) -> None:
        self._model.reset_lstm_states()

    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        states: LSTMStates = self._model.get_lstm_states(time_step)
        return states

    def set_lstm_states(self, states: LSTMStates) -> None:
        # The engine would read beyond empty ones.
        known = self.get_lstm_states() if any(not len(s[0]) for s in states.values()) else {}
        zeros = {i: tuple(np.zeros_like(part) for part in parts) for i, parts in known.items()}
        self._model.set_lstm_states(
            {i: parts if len(parts[0]) else zeros[i] for i, parts in states.items()}
        )

    def smoother(self) -> tuple[FloatArray, FloatArray]:
        self._model._cpp_backend.smoother()
        return self.get_outputs_smoother()

    def get_outputs_smoother(self) -> tuple[FloatArray, FloatArray]:
        outputs: tuple[FloatArray, FloatArray] = self._model.get_outputs_smoother()
        return outputs

    def _make_room(self, size: int) -> None:
        """Have the engine make new buffers for a batch greater than any before.

        By itself it keeps some of the old ones, and writes beyond their ends.
        """
        engine = self._model._cpp_backend
        if size > self._room and engine.z_buffer_block_size:
            engine.z_buffer_size //= engine.z_buffer_block_size
            engine.z_buffer_block_size = 0
