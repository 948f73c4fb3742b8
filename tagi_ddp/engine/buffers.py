"""The engine's buffers at a network's output, which its output updaters read and write."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp._backend import delta_states, hidden_states
from tagi_ddp.engine.pointers import LayoutError, address_of

FloatArray = NDArray[np.float32]


class OutputBuffers:
    """A pair of the engine's own objects, for what computes the outputs without the engine.

    ``states`` holds means, variances and jacobians of ``batch`` outputs of ``width``; an output
    updater writes the outputs' innovation to ``deltas``.
    """

    def __init__(self, batch: int, width: int) -> None:
        """Make the objects; raise LayoutError if their memory is not as expected."""
        import cutagi

        self.batch, self.width = batch, width
        self.states: Any = cutagi.BaseHiddenStates(batch * width, batch)
        self.deltas: Any = cutagi.BaseDeltaStates(batch * width, batch)

    def write_states(self, mean: FloatArray, variance: FloatArray, jacobian: FloatArray) -> None:
        """Write means, variances and jacobians, each [batch * width]."""
        views = hidden_states(address_of(self.states, "BaseHiddenStates"))
        for view, values in zip(views, (mean, variance, jacobian), strict=True):
            view[: values.size] = values

    def innovation(self) -> tuple[FloatArray, FloatArray]:
        """Return views of the innovation's means and variances, each [batch * width]."""
        size = self.batch * self.width
        mean, variance = delta_states(address_of(self.deltas, "BaseDeltaStates"))
        if mean.size < size:
            raise ValueError(
                f"input_delta_z_buffer holds {mean.size} elements, the outputs have {size}"
            )
        return mean[:size], variance[:size]


def empty_states() -> Any:
    """Return the engine's object for the outputs of no samples."""
    import cutagi

    return cutagi.BaseHiddenStates()


@functools.cache
def verify_buffers() -> None:
    """Check on buffers of our own that their memory is as expected; raise LayoutError."""
    buffers = OutputBuffers(2, 3)
    parts = [np.arange(6, dtype=np.float32) + 10 * k for k in range(3)]
    before = hidden_states(address_of(buffers.states, "BaseHiddenStates"))
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
