"""The compute of torch's kernels, on numpy arrays and the engine's own buffers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from tagi_ddp.checks import require_whole_samples
from tagi_ddp.compute.innovation import (
    heteroscedastic_innovation,
    innovation,
    selected_innovation,
)
from tagi_ddp.compute.interface import LSTMStates, Memory, Precision, UpdateMethod
from tagi_ddp.compute.network import Network
from tagi_ddp.compute.states import Deltas, Dense, Jacobian, States
from tagi_ddp.engine.buffers import FloatArray, HiddenStates, OutputBuffers, delta_states_of
from tagi_ddp.engine.layers import lstm_samples
from tagi_ddp.engine.locks import new_lock, torch_threads
from tagi_ddp.engine.series import NOT_SMOOTHING
from tagi_ddp.replica import Replica
from tagi_ddp.replica.device import DeviceReplica
from tagi_ddp.replica.host import HostReplica

_FORMULAS: dict[UpdateMethod, Callable[..., Deltas]] = {
    "update": innovation,
    "update_using_indices": selected_innovation,
    "update_heteros": heteroscedastic_innovation,
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # the values of malloc.h
_NOTHING = contextlib.nullcontext()
_switches = new_lock()
T = TypeVar("T", FloatArray, torch.Tensor)
Results = tuple[States | None, Deltas | None, Deltas | None]


class TorchCompute:
    """A `Network` over the engine's memory; output updaters still use the engine's buffers."""

    name: Literal["torch"] = "torch"
    takes_tensors = True

    def __init__(
        self,
        model: Any,
        replica: HostReplica,
        bucket: FloatArray | None,
        device: str,
        precision: Precision,
    ) -> None:
        """Compute ``model``, whose state is ``replica``, on ``device``.

        On the CPU the deltas are written to ``bucket``, [means | variances].
        """
        self._engine = model._cpp_backend
        self._first = model._cpp_backend.layers[0]
        self.device = torch.device(device)
        keep_freed_memory()
        self.replica: Replica = replica
        self.bucket = bucket
        if bucket is not None:
            replica.on_host.place_deltas(bucket)
            deltas = torch.from_numpy(bucket)
        else:
            parameters = replica.on_host
            if {*parameters.cap_factors(1)} - {parameters.cap_factor(1)}:
                raise ValueError(
                    "device: layers of series, and RMSNorm, have cap factors of their own in this "
                    "engine, for which there is no step on a GPU: use device='cpu', or a "
                    "cap_factor for all layers"
                )
            on_device = DeviceReplica(replica, self.device)
            self.replica, deltas = on_device, on_device.parameters.deltas
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        kernels = bucket is not None and replica.in_place and dtype == torch.float32
        self.network = Network(model, self.replica, deltas, dtype, kernels)
        self._tf32 = precision == "tf32"
        self._buffers: OutputBuffers | None = None
        self.states: States | None = None  # the last outputs
        self.innovation: Deltas | None = None  # the outputs' innovation, if it is on the device
        self._input_innovation: Deltas | None = None
        self._bound = self.replica.version
        self._shown = False  # True if the engine's buffers hold the last outputs
        self._trained = False  # True if the last forward pass was in training mode

    @property
    def training(self) -> bool:
        return bool(self._first.training)

    @property
    def to_input(self) -> bool:
        """True if backward also computes the innovation of the inputs."""
        return bool(self._engine.input_state_update)

    @property
    def results(self) -> Results:
        """The results of the last step: outputs, and the innovations of outputs and inputs."""
        return self.states, self.innovation, self._input_innovation

    @results.setter
    def results(self, results: Results) -> None:
        self.states, self.innovation, self._input_innovation = results
        self._trained = self._shown = False
        self.replica.updated()

    @property
    def samples(self) -> int:
        return 0 if self.states is None else self.states.batch // self.network.out_rows

    @property
    def input_size(self) -> int:
        return self.network.input_size

    @property
    def output_size(self) -> int:
        return 0 if self.states is None else self.states.mean.numel() // self.samples

    @torch.inference_mode()
    def forward(self, mean: T, variance: T | None) -> tuple[T, T]:
        """Compute the outputs: arrays for arrays, tensors for tensors.

        In training mode the inputs are copied, so the caller may reuse its memory before backward.
        """
        require_whole_samples(len(mean), self.network.input_size)
        return self._forward(mean, variance, None)

    def _forward(self, mean: T, variance: T | None, jacobian: Jacobian | None) -> tuple[T, T]:
        training = self.training
        inputs = self._on_device(mean, training)
        spread = None if variance is None else self._on_device(variance, training)
        states = self.compute_states(inputs, spread, jacobian)
        if isinstance(mean, torch.Tensor):
            outputs = states.mean, states.variance_tensor()
            return outputs[0].flatten().clone(), outputs[1].flatten().clone()
        return self.get_outputs()

    def compute_states(
        self, mean: torch.Tensor, variance: torch.Tensor | None, jacobian: Jacobian | None = None
    ) -> States:
        """Compute and return the outputs of inputs on the device, [batch, inputs].

        In training mode neither outputs nor inputs may change before backward.
        """
        self._find_parameters()
        training = self.training
        with self._gpu_precision():
            self.states = self.network.forward(mean, variance, training, jacobian)
        if training:
            self.replica.updated()  # running statistics
        self.innovation = self._input_innovation = None
        self._trained, self._shown = training, False
        return self.states

    @torch.inference_mode()
    def forward_from(self, inputs: HiddenStates) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs of another network's outputs."""
        require_whole_samples(inputs.mean.size, self.network.input_size)
        jacobian = Dense(self._on_device(inputs.jacobian, True))
        return self._forward(inputs.mean, inputs.variance, jacobian)

    def _on_device(self, array: T, copy: bool) -> torch.Tensor:
        if isinstance(array, np.ndarray) and self.device.type == "cpu":
            floats = np.array(array, np.float32) if copy else np.asarray(array, np.float32)
            return torch.from_numpy(floats).view(-1, self.network.input_size)
        tensor = torch.as_tensor(array).reshape(-1, self.network.input_size)
        return tensor.to(self.device, torch.float32, non_blocking=True, copy=copy)

    def _gpu_precision(self) -> AbstractContextManager[None]:
        return _precision(self._tf32) if self.device.type == "cuda" else _NOTHING

    def _find_parameters(self) -> None:
        self.replica.pull()
        if self._bound != self.replica.version:
            self.network.bind()
            self._bound = self.replica.version

    def _show(self) -> OutputBuffers:
        """Write the last outputs to the engine's buffers, once; return the buffers."""
        states = self._last_outputs()
        batch, width = self.samples, self.output_size
        if self._buffers is None or (self._buffers.batch, self._buffers.width) != (batch, width):
            self._buffers = OutputBuffers(batch, width)
        if not self._shown:
            jacobian = _flat(states.jacobian_tensor())
            self._buffers.write_states(*self.get_outputs(), jacobian)
            self._shown = True
        return self._buffers

    def _show_innovation(self) -> OutputBuffers:
        """Move an innovation on the device to the engine's buffers; return the buffers."""
        buffers, delta = self._show(), self.innovation
        if delta is not None:
            for view, part in zip(buffers.innovation(), (delta.mean, delta.variance), strict=True):
                view[:] = _flat(part)
            self.innovation = None
        return buffers

    @torch.inference_mode()
    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Compute all deltas; call ``done(begin)`` after each layer with parameters."""
        if not self._trained:
            raise RuntimeError("backward() needs a forward() in training mode; call train() first")
        assert self.states is not None
        self._find_parameters()
        deltas = self.innovation
        if deltas is None:
            shape = self.states.mean.shape
            parts = map(torch.from_numpy, self._show().innovation())
            deltas = Deltas(*(part.view(shape).to(self.device) for part in parts))
        self._input_innovation = None
        to_input = self.to_input
        with self._gpu_precision():
            below = self.network.backward(deltas, to_input, done)
        if to_input:
            self._input_innovation = below

    def update_outputs(self, method: UpdateMethod, observations: Mapping[str, Any]) -> None:
        """Compute the innovation on the device, and leave it there."""
        states = self._last_outputs()
        arrays = [_tensor(value, states.mean) for value in observations.values()]
        self.innovation = _FORMULAS[method](states, *arrays)

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the last outputs, flat."""
        states = self._last_outputs()
        return _flat(states.mean), _flat(states.variance_tensor())

    def _last_outputs(self) -> States:
        if self.states is None:
            raise RuntimeError("there are no outputs before a forward()")
        return self.states

    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        if self._input_innovation is None:
            raise RuntimeError("set input_state_update to True before backward()")
        return _flat(self._input_innovation.mean), _flat(self._input_innovation.variance)

    @property
    def output_delta_z_buffer(self) -> Any:
        """The innovation of the last inputs in an object of the engine."""
        return delta_states_of(*self.get_input_states(), self.samples)

    @property
    def output_z_buffer(self) -> Any:
        """The last outputs in an object of the engine; None before the first forward."""
        return None if self.states is None else self._show().states

    def set_outputs(self, outputs: HiddenStates) -> None:
        self._show().write_states(outputs.mean, outputs.variance, outputs.jacobian)

    @property
    def input_delta_z_buffer(self) -> Any:
        """The outputs' innovation in an object of the engine; None before the first forward."""
        return None if self.states is None else self._show_innovation().deltas

    @input_delta_z_buffer.setter
    def input_delta_z_buffer(self, value: Any) -> None:
        self._show().deltas = value
        self.innovation = None

    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        innovation = self._show_innovation().innovation()
        for view, values in zip(innovation, (delta_mu, delta_var), strict=True):
            view[:] = values

    def set_threads(self, count: int) -> None:
        """Set torch's threads, which are those of the whole process."""
        torch.set_num_threads(torch_threads(count))

    def memory(self) -> Memory:
        states = self.get_lstm_states()
        lasting = [layer.sums.reshape(-1).cpu().numpy() for layer in self.network.embeddings]
        return Memory(lstm_samples(self._engine.layers, states), states, lasting)

    def remember(self, memory: Memory) -> None:
        self.set_lstm_states(memory.lstm, memory.samples)
        for layer, values in zip(self.network.embeddings, memory.lasting, strict=True):
            layer.sums.copy_(torch.as_tensor(values).view_as(layer.sums))

    def keep(self) -> None:
        self.network.keep()

    @torch.inference_mode()
    def restore(self) -> None:
        self.network.restore()

    @torch.inference_mode()
    def restore_if(self, refused: torch.Tensor) -> bool:
        return self.network.restore_if(refused)

    def reset_lstm_states(self) -> None:
        for layer in self.network.lstms.values():
            layer.reset_states()

    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        states: LSTMStates = {}  # They are the same at any time step: torch smooths nothing.
        for index, layer in self.network.lstms.items():
            mu_h, var_h, mu_c, var_c = map(_flat, layer.get_states())
            states[index] = (mu_h, var_h, mu_c, var_c)
        return states

    def set_lstm_states(self, states: LSTMStates, samples: int | None = None) -> None:
        for index, parts in states.items():
            mu_h, var_h, mu_c, var_c = map(torch.as_tensor, parts)
            self.network.lstms[index].set_states(mu_h, var_h, mu_c, var_c, samples)

    def smoother(self) -> tuple[FloatArray, FloatArray]:
        raise RuntimeError(NOT_SMOOTHING)

    get_outputs_smoother = smoother


@contextlib.contextmanager
def _precision(tf32: bool) -> Iterator[None]:
    """Use TF32 on GPUs only if ``tf32``; torch's default uses it in part."""
    cudnn: Any = torch.backends.cudnn  # Its parts have no types.
    switches = (torch.backends.cuda.matmul, cudnn.conv)
    with _switches:  # The switches are the process's.
        before = [switch.fp32_precision for switch in switches]
        for switch in switches:
            switch.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            for switch, value in zip(switches, before, strict=True):
                switch.fp32_precision = value


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed tensors, in the whole process.

    By default it returns large pieces to the kernel, and about a third of a convolutional network's
    step is spent on getting them back. MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ in the
    environment override this.
    """
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in names):
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _tensor(value: ArrayLike, like: torch.Tensor) -> torch.Tensor:
    # Copy arrays that are read-only, of which torch would warn.
    tensor = (
        value
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(np.require(value, requirements="W"))
    )
    if tensor.dtype == like.dtype and tensor.device == like.device:
        return tensor
    dtype = tensor.dtype if tensor.dtype in (torch.int32, torch.int64) else like.dtype
    return tensor.to(like.device, dtype, non_blocking=True)


def _flat(tensor: torch.Tensor) -> FloatArray:
    """Return a copy on the host."""
    on_host: FloatArray = tensor.numpy(force=True)
    return on_host.reshape(-1) if tensor.device.type != "cpu" else on_host.flatten()
