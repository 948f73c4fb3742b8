"""What computes a replica's forward and backward, to whatever uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from tagi_ddp.engine.buffers import FloatArray, Shown
from tagi_ddp.replica.protocol import Replica

# By the index of the layer: means and variances of outputs, then of cells.
LSTMStates = dict[int, tuple[FloatArray, FloatArray, FloatArray, FloatArray]]
Choice = Literal["auto", "engine", "native", "torch"]
Precision = Literal["float32", "tf32", "bfloat16"]
UpdateMethod = Literal["update", "update_using_indices", "update_heteros"]  # of OutputUpdater


class Compute(Protocol):
    """The part of Sequential's interface that depends on who computes."""

    @property
    def name(self) -> Literal["engine", "native", "torch"]:
        """Who computes, or computed the last batch."""
        ...

    #: whether forward takes tensors, and returns tensors for them
    takes_tensors: bool

    #: the state, wherever it is kept
    replica: Replica
    output_z_buffer: Any
    input_delta_z_buffer: Any

    def forward(
        self, mean: FloatArray, variance: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs, flat, of inputs, flat; None: exact ones."""
        ...

    def forward_from(self, inputs: Shown) -> tuple[FloatArray, FloatArray]:
        """Do the same of the outputs of another network, whose activation has a jacobian."""
        ...

    def backward(self, done: Callable[[int], None] | None = None) -> None:
        """Write the parameters' deltas, from the innovation of the last outputs.

        Calls ``done(begin)`` whenever all deltas from ``begin`` on in the flat sequence are there.
        """
        ...

    def update_outputs(self, method: UpdateMethod, observations: Mapping[str, Any]) -> None:
        """Compute the innovation of the last outputs, as that method of pytagi's OutputUpdater.

        ``observations`` are its arguments by their names, flat, of float32, numbers of outputs of
        int32; or tensors, if those are taken. Their sizes have been checked.
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

    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return what the last forward pass returned."""
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

    def set_threads(self, count: int) -> None:
        """Use this many threads."""
        ...

    def get_lasting_deltas(self) -> list[FloatArray]:
        """Return what adds up over steps: of each Embedding, [means | variances]; may be views."""
        ...

    def set_lasting_deltas(self, deltas: Sequence[FloatArray]) -> None:
        """Go on from what `get_lasting_deltas` has returned."""
        ...

    def reset_lstm_states(self) -> None:
        """Forget what LSTM layers remember."""
        ...

    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        """Return what LSTM layers remember; from 0 on, a step of what they have smoothed."""
        ...

    def set_lstm_states(self, states: LSTMStates) -> None:
        """Let LSTM layers remember this."""
        ...

    def smoother(self) -> tuple[FloatArray, FloatArray]:
        """Smooth the series so far; return means and variances of its outputs."""
        ...

    def get_outputs_smoother(self) -> tuple[FloatArray, FloatArray]:
        """Return what the last smoother returned."""
        ...
