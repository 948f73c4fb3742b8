"""The compute of the engine's own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import numpy as np

from tagi_ddp.checks import require_whole_samples
from tagi_ddp.compute.interface import LSTMStates, Memory, UpdateMethod
from tagi_ddp.engine.buffers import FloatArray, HiddenStates
from tagi_ddp.engine.layers import input_size_of, lstm_samples, walk
from tagi_ddp.engine.series import SMOOTHING, Series
from tagi_ddp.engine.shapes import input_rows, last_layer, sample_shape
from tagi_ddp.replica import Replica


class EngineCompute:
    """The model's own forward and backward.

    takes_tensors: True if forward accepts tensors, and returns tensors for them. replica: the state
    of the network, on the host or on a device. input_size: the number of inputs of a sample, as of
    the last forward pass.
    """

    name: Literal["engine"] = "engine"
    takes_tensors = False

    def __init__(self, model: Any, replica: Replica) -> None:
        """Compute ``model``, whose state is ``replica``; ValueError if the engine would crash."""
        first = model._cpp_backend.layers[0]
        if not input_size_of(first):
            raise ValueError(
                f"the engine cannot compute a network that begins with a {type(first).__name__}, "
                'whose input size is unknown: use compute="torch"'
            )
        self.replica = replica
        self._model = model
        self._layers = model._cpp_backend.layers
        self._rows = input_rows(model)
        self._sample = math.prod(sample_shape(model))
        self._out_rows = last_layer(model)[1].out_rows
        self._accumulating = [layer for layer in replica.layers if layer.accumulates]
        self._series = Series(self._layers)
        self._length = 0  # the length of series for which the engine has buffers
        within = [layer.kind for layer in walk(model)]
        smoothing = sum(within.count(kind) for kind in SMOOTHING)
        if smoothing and (type(first).__name__ != "SLSTM" or smoothing != self._series.layers):
            raise ValueError(
                "the engine cannot compute SLSTM and SLinear layers unless the first is an SLSTM "
                'and none is inside a block: use compute="native"'
            )
        self._kept = Memory(0, {}, [])
        self._updater: Any = None  # pytagi's OutputUpdater
        self._trained = False  # True if the last forward pass was in training mode
        self.input_size = 0
        self._to_input = False  # True if the last backward pass computed the inputs' innovation
        self._smoothed = False
        self._override: Any = None  # a script's object that replaces the outputs' innovation
        self._stateless = False  # True if there are no states, which the engine shows as zeros
        self._room = 0  # the input elements for which the engine has buffers

    @property
    def samples(self) -> int:
        """The number of samples of the last forward pass; 0 before it."""
        return int(self._model._cpp_backend.z_buffer_block_size)

    @property
    def output_size(self) -> int:
        """The number of outputs of a sample, as of the last forward pass."""
        return self._out_rows * int(self._model.output_z_buffer.actual_size)

    def forward(
        self, mean: FloatArray, variance: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs, flat; ``variance`` None: exact inputs."""
        require_whole_samples(mean.size, self._sample)
        self._begin_forward(mean.size)
        if self._rows > 1:
            shape = -1, self._rows, self._sample // self._rows
            mean = mean.reshape(shape)
            variance = None if variance is None else variance.reshape(shape)
        try:
            outputs: tuple[FloatArray, FloatArray] = self._model.forward(mean, variance)
        except RuntimeError as error:
            raise ValueError(
                f"the network refused mu_x with {mean.size} elements: {error}"
            ) from error
        self._end_forward(mean.size)
        return outputs

    def forward_from(self, inputs: HiddenStates) -> tuple[FloatArray, FloatArray]:
        """Do the same for the outputs of another network, whose activation has a jacobian."""
        require_whole_samples(inputs.mean.size, self._sample)
        if self._series or self._rows > 1:
            raise ValueError(
                "mu_x is another network's states, which the engine's SLSTM layers, or those of "
                "series, cannot take: give arrays of means and variances"
            )
        self._begin_forward(inputs.mean.size)
        self._model._cpp_backend.forward(inputs.states, None)
        self._end_forward(inputs.mean.size)
        return self.get_outputs()

    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Write the parameters' deltas, from the innovation of the last outputs.

        Calls ``done(begin)`` when all deltas from ``begin`` on in the flat sequence are written.
        """
        if not self._trained:
            raise RuntimeError("backward() needs a forward() in training mode; call train() first")
        self._copy_override()
        self._model.backward()
        self._to_input = bool(self._model.input_state_update)
        if done is not None:
            done(0)

    def update_outputs(self, method: UpdateMethod, observations: Mapping[str, Any]) -> None:
        """Compute the innovation of the last outputs as ``method`` of pytagi's OutputUpdater does.

        ``observations`` are the method's arguments by name: flat arrays of float32, of int32 for
        numbers of outputs, or tensors, if `takes_tensors`. Their sizes have been checked.
        """
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
        """The last outputs in an object of the engine."""
        return self._model.output_z_buffer

    def set_outputs(self, outputs: HiddenStates) -> None:
        """Copy hidden states of the same size to ``output_z_buffer``."""
        self.output_z_buffer.copy_from(outputs.states, outputs.mean.size)

    @property
    def input_delta_z_buffer(self) -> Any:
        """The innovation of the last outputs in an object of the engine."""
        return self._model.input_delta_z_buffer if self._override is None else self._override

    @input_delta_z_buffer.setter
    def input_delta_z_buffer(self, value: Any) -> None:
        # The engine does not get it: it would take its size for the size of the widest layer.
        self._override = value

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the last outputs; RuntimeError before the first forward."""
        if not self.samples:
            raise RuntimeError("there are no outputs before a forward()")
        outputs: tuple[FloatArray, FloatArray] = self._model.get_outputs()
        return outputs

    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        """Return the innovation of the last inputs, flat."""
        # After a forward of states the engine's own method uses the size of an older batch.
        if not self._to_input:
            raise RuntimeError("set input_state_update to True before backward()")
        return _innovation(self.output_delta_z_buffer, self.samples * self.input_size)

    @property
    def output_delta_z_buffer(self) -> Any:
        """The innovation of the last inputs in an object of the engine."""
        return self._model._cpp_backend.output_delta_z_buffer

    def _copy_override(self) -> None:
        """Copy the script's innovation, if there is one, to the engine."""
        if self._override is None:
            return
        size = self.samples * self.output_size
        mean, variance = _innovation(self._override, size)
        if not mean.size == variance.size == size:
            raise ValueError(
                f"input_delta_z_buffer holds {mean.size} elements, the outputs have {size}"
            )
        self.set_delta_z(mean, variance)

    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        """Set the innovation of the last outputs, flat."""
        # The engine replaces its buffer by the arguments; it must be as large as the widest layer.
        room = np.zeros((2, self._model.input_delta_z_buffer.size), np.float32)
        room[:, : delta_mu.size] = delta_mu, delta_var
        self._override = None
        self._model.set_delta_z(*room)

    def memory(self) -> Memory:
        """Return the state that layers keep between steps; ``lasting`` may be views."""
        states = self.get_lstm_states()
        lasting = [
            np.concatenate([layer.handle.delta_mu_w, layer.handle.delta_var_w], dtype=np.float32)
            for layer in self._accumulating
        ]
        return Memory(lstm_samples(self._layers, states), states, lasting)

    def remember(self, memory: Memory) -> None:
        """Continue from the `memory` of a compute of the same network."""
        if not memory.samples:
            self.reset_lstm_states()
            self._stateless = True
        elif memory.samples != lstm_samples(self._layers, self.get_lstm_states()):
            # The layers allocate states for the size of a batch in its forward.
            training = bool(self._layers[0].training)
            self._model.eval()
            self.forward(np.zeros(memory.samples * self._sample, np.float32), None)
            if training:
                self._model.train()
        if memory.samples:
            self.set_lstm_states(memory.lstm)
        for layer, values in zip(self._accumulating, memory.lasting, strict=True):
            mean, variance = np.split(values, 2)
            layer.handle.delta_mu_w, layer.handle.delta_var_w = mean.tolist(), variance.tolist()

    def keep(self) -> None:
        """Copy the state that forward and backward change, without outputs and deltas.

        It is the `memory`, and the series that smoothing layers record.
        """
        self._kept = self.memory()
        self._series.keep()

    def restore(self) -> None:
        """Restore the last copy of `keep`."""
        self.remember(self._kept)
        self._series.restore()

    def restore_if(self, refused: Any) -> bool:
        """Restore it, without a wait, if ``refused``, a tensor on the replica's device, is true.

        Returns False, and does nothing, if only the host can restore.
        """
        return False

    def reset_lstm_states(self) -> None:
        """Reset the states of LSTM and SLSTM layers; the next step begins another series."""
        # Before the first forward the engine's own method would read uninitialised sizes.
        states = self.get_lstm_states()
        if lstm_samples(self._layers, states):
            self._model.set_lstm_states(_zeros(states))
        self._series.restart()

    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        """Return the states of LSTM layers; from ``time_step`` 0 on, those of a smoothed step."""
        states: LSTMStates = self._model.get_lstm_states(time_step)
        if self._stateless and time_step == -1:
            empty = np.zeros(0, np.float32)
            states = dict.fromkeys(states, (empty, empty, empty, empty))
        return states

    def set_lstm_states(self, states: LSTMStates) -> None:
        """Set the states of LSTM layers."""
        current = self.get_lstm_states()
        if lstm_samples(self._layers, current):
            zeros = _zeros(current)  # The engine would read beyond the end of empty ones.
            self._model.set_lstm_states(
                {i: parts if len(parts[0]) else zeros[i] for i, parts in states.items()}
            )

    def smoother(self) -> tuple[FloatArray, FloatArray]:
        """Smooth the series so far; return means and variances of its outputs."""
        # The engine checks neither the layers that it needs nor that there is a series.
        self._series.require_smoothing()
        self._model._cpp_backend.smoother()
        self._smoothed = True
        return self.get_outputs_smoother()

    def get_outputs_smoother(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs of the last `smoother`."""
        if not self._smoothed:
            raise RuntimeError("there are no smoothed outputs before a smoother()")
        outputs: tuple[FloatArray, FloatArray] = self._model.get_outputs_smoother()
        return outputs

    def _begin_forward(self, size: int) -> None:
        """Make room for a forward pass of ``size`` input elements.

        The engine allocates its buffers once, for the batch and ``num_samples`` of that time. With
        a larger batch it would write beyond the end of some.
        """
        engine = self._model._cpp_backend
        self._to_input = self._stateless = False
        self._override = None
        fits = size <= self._room
        if self._series:
            length, self._length = self._length, int(engine.num_samples)
            fits &= length == self._length
            if self._layers[0].training or not self._length:
                self._series.require_room(self._length)
                self._series.log()
        if not fits and engine.z_buffer_block_size:
            engine.z_buffer_size //= engine.z_buffer_block_size * self._rows
            engine.z_buffer_block_size = 0
        if not engine.z_buffer_block_size:
            self._room = 0  # The engine allocates buffers for the next batch.

    def _end_forward(self, size: int) -> None:
        """Record a forward pass of ``size`` input elements."""
        self._room = max(self._room, size)
        self.input_size = size // self.samples
        self._trained = bool(self._layers[0].training)


def _innovation(states: Any, size: int) -> tuple[FloatArray, FloatArray]:
    """Return copies of means and variances of the first ``size`` of an engine's delta states."""
    parts = states.delta_mu, states.delta_var
    mean, variance = (np.array(part[:size], np.float32) for part in parts)
    return mean, variance


def _zeros(states: LSTMStates) -> LSTMStates:
    """Return zeros of the same sizes."""
    zeros = {i: tuple(np.zeros_like(part) for part in parts) for i, parts in states.items()}
    return cast(LSTMStates, zeros)
