"""What computes a replica's forward and backward, to whatever uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tagi_ddp.engine.buffers import FloatArray, Shown
from tagi_ddp.replica.protocol import Replica

# By the index of the layer: means and variances of outputs, then of cells.
LSTMStates = dict[int, tuple[FloatArray, FloatArray, FloatArray, FloatArray]]
Choice = Literal["auto", "engine", "native", "torch"]
Precision = Literal["float32", "tf32", "bfloat16"]
UpdateMethod = Literal["update", "update_using_indices", "update_heteros"]  # of OutputUpdater


@dataclass(frozen=True)
class Memory:
    """The state that layers carry from step to step beside parameters and running statistics.

    samples: the size of the batch that the LSTM states belong to; 0 without any. lstm: the states.
    lasting: the deltas that add up over steps, of each Embedding, [means | variances].
    """

    samples: int
    lstm: LSTMStates
    lasting: list[FloatArray]


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

    @property
    def output_z_buffer(self) -> Any:
        """The last outputs in an object of the engine; None before the first forward."""
        ...

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

    def set_outputs(self, given: Shown) -> None:
        """Copy hidden states of as many outputs to ``output_z_buffer``."""
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

    def memory(self) -> Memory:
        """Return what layers carry from step to step; ``lasting`` may be views."""
        ...

    def remember(self, memory: Memory) -> None:
        """Continue from what the `memory` of a compute of the same network has returned."""
        ...

    def keep(self) -> None:
        """Copy what forward and backward change beside outputs and deltas.

        That is the `memory`, and the series that smoothing layers record.
        """
        ...

    def restore(self) -> None:
        """Put back what `keep` has copied last."""
        ...

    def restore_if(self, refused: Any) -> bool:
        """Put it back if ``refused``, a tensor on the replica's device, is true, without a wait.

        Returns False, and has done nothing, where only the host can do this.
        """
        ...

    def reset_lstm_states(self) -> None:
        """Forget the states of LSTM and SLSTM layers; the next step begins another series."""
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
