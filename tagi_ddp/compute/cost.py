"""The cost of a step, natively and by torch, which shows the faster of the two for a batch.

It is a pure function of the layers' sizes and the batch, so all ranks and runs choose alike. The
figures are of one thread of a processor with AVX-512, for forward and backward together. For linear
layers both cost the same at 20 to 30 million weights times samples: torch's products are faster by
a fifth, but each of its layers costs some hundred microseconds more to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tagi_ddp.engine.layers import lstm_steps
from tagi_ddp.replica.protocol import Replica


@dataclass(frozen=True)
class _Cost:
    """The cost of a layer in microseconds a call, and in nanoseconds a weight or output and sample.

    Each is a pair: natively and by torch.
    """

    call: tuple[float, float] = (0.5, 50)
    weight: tuple[float, float] = (0, 0)
    output: tuple[float, float] = (2, 2)


_ACTIVATION = _Cost()
# Mixtures and softmaxes compute exponentials and error functions, one at a time.
_SLOW_ACTIVATION = _Cost(output=(80, 45))
_COSTS = {
    "Linear": _Cost(call=(1, 260), weight=(0.22, 0.19)),
    "LSTM": _Cost(call=(2, 700), weight=(0.17, 0.165)),
    "LayerNorm": _Cost(call=(1, 200), output=(5, 5)),
    "Embedding": _Cost(call=(1, 200), output=(5, 5)),
    "ReLU": _ACTIVATION,
    "Sigmoid": _ACTIVATION,
    "Tanh": _ACTIVATION,
    "LeakyReLU": _ACTIVATION,
}


class Work:
    """The work of layers, the engine's objects."""

    def __init__(self, layers: Sequence[Any], replica: Replica) -> None:
        counts = [count for _, count in replica.parameters.blocks[::2]]
        handles = [id(layer.handle) for layer in replica.layers]
        weights = dict(zip(handles, counts, strict=True))
        self._call = 0.0  # torch's cost less the native one, in microseconds; so is _sample
        self._sample = 0.0
        outputs = 0
        for handle in layers:
            kind = type(handle).__name__
            cost = _COSTS.get(kind, _SLOW_ACTIVATION)
            uses = 1  # how often a sample uses each weight
            if kind == "LSTM":
                uses = lstm_steps(handle)
                outputs = int(handle.output_size) * uses
            elif kind in ("Linear", "Embedding"):
                outputs = int(handle.output_size)
            self._call += cost.call[1] - cost.call[0]
            self._sample += (
                (cost.weight[1] - cost.weight[0]) * weights.get(id(handle), 0) * uses * 1e-3
            )
            self._sample += (cost.output[1] - cost.output[0]) * outputs * 1e-3

    def is_native(self, batch: int) -> bool:
        """Return whether the backend's kernels are faster than torch's for ``batch`` samples."""
        return self._call + self._sample * batch > 0
