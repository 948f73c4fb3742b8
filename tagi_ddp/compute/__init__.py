"""Who runs a replica's forward and backward: the engine's kernels, or torch's."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.communicators import Communicator
from tagi_ddp.engine.buffers import verify_buffers
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.replica.host import InPlace, Replica

FloatArray = NDArray[np.float32]
# By the index of the layer: means and variances of outputs, then of cells.
LSTMStates = dict[int, tuple[FloatArray, FloatArray, FloatArray, FloatArray]]
Choice = Literal["auto", "engine", "torch"]
Precision = Literal["float32", "tf32", "bfloat16"]


class Compute(Protocol):
    """The part of Sequential's interface that depends on who computes."""

    #: "engine" or "torch"
    name: Literal["engine", "torch"]
    #: the state, wherever it is kept
    replica: Replica
    #: where the buffers are that output updaters work on: "cpu:0", "cuda:0"
    updater_device: str
    #: where the deltas lie, [means | variances], if not in the engine or on a device
    bucket: FloatArray | None
    output_z_buffer: Any
    input_delta_z_buffer: Any

    def forward(
        self, mean: FloatArray, variance: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs, flat, of inputs, flat; None: exact ones."""
        ...

    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Write the parameters' deltas, from the innovation of the last outputs.

        Calls ``done(begin)`` whenever all deltas from ``begin`` on in the flat sequence are there.
        """
        ...

    @property
    def samples(self) -> int:
        """The number of samples of the last forward pass."""
        ...

    @property
    def output_size(self) -> int:
        """The number of outputs of a sample, as of the last forward pass."""
        ...

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return what the last forward pass returned."""
        ...

    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        """Return the innovation of the last inputs, flat."""
        ...

    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        """Set the innovation of the last outputs, flat."""
        ...

    def set_threads(self, count: int) -> None:
        """Use this many threads."""
        ...

    def reset_lstm_states(self) -> None:
        """Forget what LSTM layers remember."""
        ...

    def get_lstm_states(self) -> LSTMStates:
        """Return what LSTM layers remember."""
        ...

    def set_lstm_states(self, states: LSTMStates) -> None:
        """Let LSTM layers remember this."""
        ...


def choose(
    model: Any, replica: Replica, choice: Choice, device: str, precision: Precision
) -> Literal["engine", "torch"]:
    """Return who computes ``model``.

    "auto" takes torch if it is installed and knows every layer; if not, the engine, with a warning
    that says why. Raises ValueError when "torch" is asked for and cannot be had.
    """
    if choice not in ("auto", "engine", "torch"):
        raise ValueError(f'compute is {choice!r}; use "auto", "engine" or "torch"')
    if precision not in ("float32", "tf32", "bfloat16"):
        raise ValueError(f'precision is {precision!r}; use "float32", "tf32" or "bfloat16"')
    if str(model.device) != "cpu":
        return _engine_on_device(replica, choice, device, precision)
    if choice == "engine":
        if (device, precision) != ("cpu", "float32"):
            raise ValueError(
                f'compute="engine" runs on "cpu" in "float32", not on {device!r} in {precision!r}'
            )
        return "engine"
    reason = _why_not_torch(model, replica)
    if reason is None:
        _check_device(device)
        return "torch"
    if choice == "torch" or (device, precision) != ("cpu", "float32"):
        raise ValueError(
            f'torch cannot compute this network: {reason}; use compute="engine" on "cpu"'
        )
    warnings.warn(
        f"the engine computes this network, 10 to 30 times slower than torch would: {reason}. "
        'compute="engine" asks for it without this warning.',
        RuntimeWarning,
        stacklevel=2,
    )
    return "engine"


def _engine_on_device(
    replica: Any, choice: Choice, device: str, precision: Precision
) -> Literal["engine"]:
    """Return "engine", which alone computes a model that is on a GPU."""
    where = str(replica.parameters.mu.device)
    if choice == "torch" or precision != "float32" or device not in ("cpu", where):
        raise ValueError(
            f"model is on {where}, where the engine computes it in float32; for "
            f"compute={choice!r}, device={device!r}, precision={precision!r} wrap it while it is "
            "on the CPU"
        )
    return "engine"


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        raise ValueError(f"device is {device!r}, which torch cannot use: {text}") from error


def _why_not_torch(model: Any, replica: Replica) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install 'tagi-ddp[torch]')"
    if not isinstance(replica, InPlace):
        return "the engine's memory cannot be used in place"
    try:
        verify_buffers()
    except LayoutError as error:
        return str(error)
    from tagi_ddp.compute.network import why_not

    return why_not(model)


def make_compute(
    name: Literal["engine", "torch"],
    model: Any,
    replica: Replica,
    communicator: Communicator,
    device: str,
    precision: Precision,
) -> Compute:
    """Return who computes the replica ``model`` of ``communicator``'s ranks on ``device``."""
    if name == "engine":
        from tagi_ddp.compute.on_engine import EngineCompute

        return EngineCompute(model, replica)
    from tagi_ddp.compute.on_torch import TorchCompute

    return TorchCompute(model, replica, communicator, device, precision)
