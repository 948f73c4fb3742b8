"""The series that the engine's smoothing layers, SLSTM and SLinear, record step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp._backend import linear_series, lstm_series
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.dialect import make_layer
from tagi_ddp.engine.layout import find_layout, vector_sizes, words_of
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.engine.pointers import LayoutError, address_of, layout_errors

SMOOTHING = ("SLSTM", "SLinear")


NOT_SMOOTHING = (
    "smoother() needs SLSTM layers and, last, an SLinear that takes the last one's outputs"
)


def smooths(handles: Sequence[Any]) -> bool:
    """Return whether a network of these layers can smooth its series."""
    lstms = [handle for handle in handles if type(handle).__name__ == "SLSTM"]
    if not lstms or type(handles[-1]).__name__ != "SLinear":
        return False
    return bool(handles[-1].input_size == lstms[-1].output_size)


class Series:
    """The series of a network's smoothing layers; False if it has no such layers."""

    def __init__(self, handles: Sequence[Any]) -> None:
        """Find the layers' memory; raise LayoutError if it is not as expected."""
        kinds = [(type(handle).__name__, handle) for handle in handles]
        lstm, linear = find_series() if any(kind in SMOOTHING for kind, _ in kinds) else (0, 0)
        self._lstms = [address_of(handle) + lstm for kind, handle in kinds if kind == "SLSTM"]
        self._linears = [address_of(handle) + linear for kind, handle in kinds if kind == "SLinear"]
        self._smooths = smooths(handles)
        self._kept: list[int] = []  # each layer's next step at the time of `keep`
        self._log: list[list[tuple[int, list[FloatArray]]]] = []

    @property
    def layers(self) -> int:
        """The number of smoothing layers."""
        return len(self._lstms) + len(self._linears)

    def __bool__(self) -> bool:
        """Return whether there are smoothing layers."""
        return self.layers > 0

    def require_room(self, samples: int) -> None:
        """Raise ValueError if a series of ``samples`` steps is full; the engine does not check."""
        for step, length, _ in self._layers():
            if length != samples:
                step[0] = 0  # The engine allocates memory for another series.
            if step[0] >= samples:
                raise ValueError(
                    f"the series has more than num_samples = {samples} steps: set num_samples "
                    "before, or call smoother() at its end"
                )

    def require_smoothing(self) -> None:
        """Raise RuntimeError unless there are a series and the layers that smooth it."""
        if not self._smooths:
            raise RuntimeError(NOT_SMOOTHING)
        if any(length == 0 for _, length, _ in self._layers()):
            raise RuntimeError("smoother() needs a series: call forward() and backward() before")

    def restart(self) -> None:
        """Begin another series."""
        for step, _, _ in self._layers():
            step[0] = 0

    def keep(self) -> None:
        """Store the series' next step, and begin a log of overwritten values."""
        self._kept = [int(step[0]) for step, _, _ in self._layers()]
        self._log.clear()

    def log(self) -> None:
        """Copy the values that the next forward and backward overwrite to the log."""
        self._log.append(
            [
                (int(step[0]), [_row(part, step[0], length).copy() for part in parts])
                for step, length, parts in self._layers()
            ]
        )

    def restore(self) -> None:
        """Restore the values that were overwritten since the last `keep`."""
        layers = self._layers()
        for entry in reversed(self._log):
            for (_, length, parts), (at, rows) in zip(layers, entry, strict=True):
                for part, row in zip(parts, rows, strict=True):
                    now = _row(part, at, length)
                    if now.size == row.size:  # Else the engine has allocated new memory.
                        now[...] = row
        self._log.clear()
        for (step, _, _), kept in zip(layers, self._kept, strict=True):
            step[0] = kept

    def _layers(self) -> list[tuple[NDArray[np.int32], int, list[FloatArray]]]:
        """Return each layer's next step, its series' length, and the vectors that passes write.

        They are views, valid until the engine allocates new memory.
        """
        none: list[FloatArray] = []
        linears = [(*linear_series(address), none) for address in self._linears]
        return [*map(lstm_series, self._lstms), *linears]


def _row(part: FloatArray, step: int, length: int) -> FloatArray:
    """Return the elements of ``part`` for a step; none beyond the end of the series."""
    width = part.size // length if length else 0
    return part[step * width : (step + 1) * width]


@functools.cache
@layout_errors()
def find_series() -> tuple[int, int]:
    """Return the offsets of the series of SLSTM and SLinear; raise LayoutError if not found."""
    load_engine()
    import cutagi

    lstm = make_layer(cutagi.SLSTM(0, 0, seq_len=1, bias=True), 1, 2, 24, 8)
    linear = make_layer(cutagi.SLinear(0, 0, True), 2, 1, 2, 1)
    network = cutagi.Sequential([lstm, linear])
    network.num_samples = 5
    one = np.ones(1, np.float32)
    for _ in range(3):
        network.forward(one, one)
        network.backward()
    offsets = _offset(lstm, [10] * 13 + [20], 5, 3), _offset(linear, [5] * 6, 5, 3)
    parts = lstm_series(address_of(lstm) + offsets[0])[2]
    rows = [_row(part, 2, 5) for part in parts[:8]]
    states = network.get_lstm_states(-1)[0]
    if [row.tolist() for row in rows[4:]] != [list(part) for part in states]:
        raise LayoutError("SLSTM's hidden and cell states are not where they should be")
    return offsets


def _offset(layer: Any, sizes: list[int], length: int, step: int) -> int:
    """Return the offset of a series of ``length`` steps, of which ``step`` have been made.

    Its vectors, of these sizes, lie between the length and the step.
    """
    count = len(sizes)
    address, end = address_of(layer), find_layout().end
    words = words_of(address)
    for index in range(end // 8, len(words) - 3 * count - 1):  # Behind the layer there may be more.
        if (
            words[index] == length
            and vector_sizes(words, index + 1, count) == sizes
            and words[index + 1 + 3 * count] & 0xFFFFFFFF == step
        ):
            return 8 * index
    raise LayoutError(f"the series of {type(layer).__name__} is not where it should be")
