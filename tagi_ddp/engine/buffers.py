"""The engine's buffers at a network's output, which its output updaters read and write."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp._backend import delta_states, hidden_states
from tagi_ddp.engine.dialect import dialect, make_layer
from tagi_ddp.engine.layout import read_memory
from tagi_ddp.engine.pointers import LayoutError, address_of, layout_errors

FloatArray = NDArray[np.float32]


class OutputBuffers:
    """A pair of the engine's own objects, for outputs that the engine does not compute itself.

    ``states`` holds means, variances and jacobians of ``batch`` outputs of ``width``; an output
    updater writes the outputs' innovation to ``deltas``.
    """

    def __init__(self, batch: int, width: int) -> None:
        """Create the objects; raise LayoutError if their memory is not as expected."""
        hidden, delta = _located()
        self.batch, self.width = batch, width
        self.states = hidden(batch * width, batch)
        self.states_address = self.states.address = address_of(self.states, "BaseHiddenStates")
        self.deltas = delta(batch * width, batch)
        self.deltas.address = self.deltas_address

    @property
    def deltas(self) -> Any:
        """The engine's object for the outputs' innovation."""
        return self._deltas

    @deltas.setter
    def deltas(self, value: Any) -> None:
        self._deltas = value
        self.deltas_address = address_of(value, "BaseDeltaStates")

    def write_states(self, mean: FloatArray, variance: FloatArray, jacobian: FloatArray) -> None:
        """Write means, variances and jacobians, each [batch * width]."""
        for view, values in zip(
            hidden_states(self.states_address), (mean, variance, jacobian), strict=True
        ):
            view[: values.size] = values

    def innovation(self) -> tuple[FloatArray, FloatArray]:
        """Return views of the innovation's means and variances, each [batch * width]."""
        size = self.batch * self.width
        mean, variance = delta_states(self.deltas_address)
        if mean.size < size:
            raise ValueError(
                f"input_delta_z_buffer holds {mean.size} elements, the outputs have {size}"
            )
        return mean[:size], variance[:size]


@dataclass(frozen=True)
class HiddenStates:
    """The contents of hidden states: views, [batch * width] each, valid as long as ``states``."""

    states: Any
    batch: int
    mean: FloatArray
    variance: FloatArray
    jacobian: FloatArray


def read_states(states: Any) -> HiddenStates:
    """Return the contents of an engine's hidden states, such as ``output_z_buffer``."""
    batch = int(states.block_size)
    size = count_of(states)
    views = hidden_states(address_of(states, "BaseHiddenStates"))
    mean, variance, jacobian = (view[:size] for view in views)
    if not mean.size == variance.size == jacobian.size == size:
        raise ValueError(
            f"hidden states of {batch} samples with {size // max(1, batch)} elements hold "
            f"{mean.size}: give an output_z_buffer after its network's forward()"
        )
    return HiddenStates(states, batch, mean, variance, jacobian)


def count_of(states: Any) -> int:
    """Return the number of elements of an engine's hidden states."""
    count = int(states.block_size * states.actual_size)
    return count * _rows_of(states) if dialect().sequences else count


_ROWS = 8 + 3 * 24 + 2 * 8  # the offset of the rows of a sample: vectors and two sizes precede it


def _rows_of(states: Any) -> int:
    _verify_rows()
    return int(_sizes_of(states)[0])


def _sizes_of(states: Any) -> tuple[int, int]:
    """Return the rows of a sample, and the elements of a row."""
    data = read_memory(address_of(states, "BaseHiddenStates") + _ROWS, 16)
    rows, width = struct.unpack("2Q", data)
    return rows, width


@functools.cache
@layout_errors()
def _verify_rows() -> None:
    import cutagi

    lstm = make_layer(cutagi.LSTM(0, 0, seq_len=3, bias=True), 1, 2, 24, 8)
    network = cutagi.Sequential([lstm])
    network.forward(np.ones((5, 3, 1), np.float32), None)
    if _sizes_of(network.output_z_buffer) != (3, 2):
        raise LayoutError("the rows of the engine's hidden states are not where they should be")


def delta_states_of(mean: FloatArray, variance: FloatArray, batch: int) -> Any:
    """Return an engine's object with these innovations, [batch * width] each."""
    buffers = OutputBuffers(batch, mean.size // batch)
    for view, values in zip(buffers.innovation(), (mean, variance), strict=True):
        view[:] = values
    return buffers.deltas


@functools.cache
def _located() -> tuple[type, type]:
    """Return the engine's classes with an ``address``, as a look-up takes microseconds."""
    import cutagi

    class LocatedHiddenStates(cutagi.BaseHiddenStates):  # type: ignore[misc]
        address: int

    class LocatedDeltaStates(cutagi.BaseDeltaStates):  # type: ignore[misc]
        address: int

    return LocatedHiddenStates, LocatedDeltaStates


def empty_states() -> Any:
    """Return the engine's object for the outputs of no samples."""
    import cutagi

    return cutagi.BaseHiddenStates()


@functools.cache
@layout_errors()
def verify_buffers() -> None:
    """Verify on test buffers that their memory is as expected; raise LayoutError if not."""
    buffers = OutputBuffers(2, 3)
    parts = [np.arange(6, dtype=np.float32) + 10 * k for k in range(3)]
    before = hidden_states(buffers.states_address)
    if [view.size for view in before] != [6, 6, 6] or not (before[2] == 1).all():
        raise LayoutError("the engine's hidden states are not as expected")
    buffers.write_states(*parts)
    for name, part in zip(("mu_a", "var_a", "jcb"), parts, strict=True):
        if getattr(buffers.states, name) != part.tolist():
            raise LayoutError(f"hidden states' {name} is not where it should be")
    buffers.deltas.delta_mu, buffers.deltas.delta_var = parts[0].tolist(), parts[1].tolist()
    for view, part in zip(buffers.innovation(), parts, strict=False):
        if not np.array_equal(view, part):
            raise LayoutError("the engine's delta states are not as expected")
