"""The types of the arguments and the memory of all computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tagi_ddp.engine.buffers import FloatArray

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
