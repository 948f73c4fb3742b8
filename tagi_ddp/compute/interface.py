"""The interface of a compute, which runs a replica's forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tagi_ddp.engine.buffers import FloatArray, Shown
from tagi_ddp.replica.protocol import Replica

# The states by the index of the layer: means and variances of outputs, then of cells.
LSTMStates = dict[int, tuple[FloatArray, FloatArray, FloatArray, FloatArray]]
Choice = Literal["auto", "engine", "native", "torch"]
Precision = Literal["float32", "tf32", "bfloat16"]
UpdateMethod = Literal["update", "update_using_indices", "update_heteros"]  # of OutputUpdater


@dataclass(frozen=True)
class Memory:
    """The state that layers keep between steps, without parameters and running statistics.

    samples: the size of the batch that the LSTM states belong to; 0 without any. lstm: the states.
    lasting: the deltas that add up over steps, of each Embedding, [means | variances].
    """

    samples: int
    lstm: LSTMStates
    lasting: list[FloatArray]


class Compute(Protocol):
    """The part of Sequential's interface that depends on the compute."""

    @property
    def name(self) -> Literal["engine", "native", "torch"]:
        """The name of the compute, or of the one that computed the last batch."""
        ...

    #: True if forward accepts tensors, and returns tensors for them
    takes_tensors: bool

    #: the state of the network, on the host or on a device
    replica: Replica

    @property
    def output_z_buffer(self) -> Any:
        """The last outputs in an object of the engine; None before the first forward."""
        ...

    input_delta_z_buffer: Any

    def forward(
        self, mean: FloatArray, variance: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs, flat; ``variance`` None: exact inputs."""
        ...

    def forward_from(self, inputs: Shown) -> tuple[FloatArray, FloatArray]:
        """Do the same for the outputs of another network, whose activation has a jacobian."""
        ...

    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Write the parameters' deltas, from the innovation of the last outputs.

        Calls ``done(begin)`` when all deltas from ``begin`` on in the flat sequence are written.
        """
        ...

    def update_outputs(self, method: UpdateMethod, observations: Mapping[str, Any]) -> None:
        """Compute the innovation of the last outputs as ``method`` of pytagi's OutputUpdater does.

        ``observations`` are the method's arguments by name: flat arrays of float32, of int32 for
        numbers of outputs, or tensors, if `takes_tensors`. Their sizes have been checked.
        """
        ...

    @property
    def samples(self) -> int:
        """The number of samples of the last forward pass; 0 before it."""
        ...

    @property
    def input_size(self) -> int:
        """The number of inputs of a sample, as of the last forward pass."""
        ...

    @property
    def output_size(self) -> int:
        """The number of outputs of a sample, as of the last forward pass."""
        ...

    def set_outputs(self, outputs: Shown) -> None:
        """Copy hidden states of the same size to ``output_z_buffer``."""
        ...

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs of the last forward pass."""
        ...

    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        """Return the innovation of the last inputs, flat."""
        ...

    @property
    def output_delta_z_buffer(self) -> Any:
        """The innovation of the last inputs in an object of the engine."""
        ...

    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        """Set the innovation of the last outputs, flat."""
        ...

    def memory(self) -> Memory:
        """Return the state that layers keep between steps; ``lasting`` may be views."""
        ...

    def remember(self, memory: Memory) -> None:
        """Continue from the `memory` of a compute of the same network."""
        ...

    def keep(self) -> None:
        """Copy the state that forward and backward change, without outputs and deltas.

        It is the `memory`, and the series that smoothing layers record.
        """
        ...

    def restore(self) -> None:
        """Restore the last copy of `keep`."""
        ...

    def restore_if(self, refused: Any) -> bool:
        """Restore it, without a wait, if ``refused``, a tensor on the replica's device, is true.

        Returns False, and does nothing, if only the host can restore.
        """
        ...

    def reset_lstm_states(self) -> None:
        """Reset the states of LSTM and SLSTM layers; the next step begins another series."""
        ...

    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        """Return the states of LSTM layers; from ``time_step`` 0 on, those of a smoothed step."""
        ...

    def set_lstm_states(self, states: LSTMStates) -> None:
        """Set the states of LSTM layers."""
        ...

    def smoother(self) -> tuple[FloatArray, FloatArray]:
        """Smooth the series so far; return means and variances of its outputs."""
        ...

    def get_outputs_smoother(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs of the last `smoother`."""
        ...
