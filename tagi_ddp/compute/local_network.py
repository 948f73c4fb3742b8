"""The replica of one rank: its compute, its inputs, and its deltas between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp.checks import flat_floats, require_rows, require_variances, shape_of
from tagi_ddp.compute.computes import Compute, Computes
from tagi_ddp.compute.micro_batches import Accumulation
from tagi_ddp.compute.rollback import Rollback
from tagi_ddp.compute.sorted_labels import SortedLabels
from tagi_ddp.engine.buffers import FloatArray, HiddenStates, read_states
from tagi_ddp.engine.layers import require_even
from tagi_ddp.engine.shapes import sample_shape, swaps_in_samples


class Early(Protocol):
    """An exchange that reduces deltas while backward computes others."""

    def discard(self) -> None:
        """Wait for the reductions of deltas that backward is about to replace."""
        ...

    def start(self, begin: int) -> None:
        """Reduce the deltas from ``begin`` on in the flat sequence, which are complete."""
        ...

    def start_nothing(self) -> None:
        """Reduce zeros: this rank has no deltas for the next step, but others may have."""
        ...


class LocalNetwork:
    """A network on one rank, without the other ranks.

    labels: looks at the labels of each step, until it warns; None: no look.
    misfit: the error of an innovation of the wrong size, and the buffer that it has replaced.
    """

    def __init__(self, model: Any, computes: Computes) -> None:
        """Compute ``model`` by one of ``computes``."""
        self.model = model
        self.computes = computes
        self.replica = self.compute.replica
        self.accumulation = Accumulation(self.replica)
        self.rollback = Rollback(model, self.computes, self.replica)
        self.misfit: tuple[str, Any] | None = None
        self.labels: SortedLabels | None = None
        self.swaps = swaps_in_samples(model)
        self._sample = sample_shape(model)

    @property
    def compute(self) -> Compute:
        """The compute of the last batch."""
        return self.computes.now

    def forward(
        self,
        mu_x: ArrayLike,
        var_x: ArrayLike | None,
        shared: bool,
        look: Callable[[Any], None] | None,
    ) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs of a share; an error undoes the step that begins with it.

        ``shared``: other ranks have shares of the same batch. ``look`` gets the flat inputs.
        """
        begins = False  # True if this begins a step that can be undone
        try:
            mean, variance, states = self._checked(mu_x, var_x)
            if self.misfit is not None:
                self.undo_misfit()
            if self.rollback.needed and self.accumulation.samples is None:
                self.rollback.keep()
                begins = True
            if look is not None:
                look(mean)
            if len(mean) == 0:
                self.accumulation.forwarded = 0
                return mean, mean + 0
            compute = self.computes.choose(mean)
            if states is None:
                outputs = compute.forward(mean, variance)
            else:
                outputs = compute.forward_from(states)
            self.accumulation.forwarded = compute.samples
            if self.swaps and (shared or self.accumulation.adds):
                require_even(compute.samples)
            return outputs
        except BaseException:
            if begins:
                self.undo()
            raise

    def _checked(
        self, mu_x: ArrayLike, var_x: ArrayLike | None
    ) -> tuple[Any, Any, HiddenStates | None]:
        """Return means and variances, flat, and the hidden states if ``mu_x`` holds some."""
        keep_tensors = self.computes.takes_tensors
        if type(mu_x) is not np.ndarray and hasattr(mu_x, "mu_a"):
            states = read_states(mu_x)
            mean: Any = states.mean
        else:
            states, shape = None, shape_of(mu_x)
            if shape[1:] != self._sample:
                require_rows("mu_x", shape, self._sample)
            mean = flat_floats("mu_x", mu_x, keep_tensors)
        if var_x is None:
            return mean, None, states
        require_rows("var_x", shape_of(var_x), self._sample)
        variance = flat_floats("var_x", var_x, keep_tensors)
        if len(variance) != len(mean):
            raise ValueError(
                f"var_x has {len(variance)} elements, mu_x {len(mean)}; give one variance for "
                "each mean"
            )
        require_variances("var_x", variance)
        return mean, variance, states

    def backward(self, early: Early | None) -> None:
        """Compute the deltas; ``early`` begins to reduce them meanwhile."""
        if self.misfit is not None:
            raise ValueError(self.misfit[0])
        accumulation = self.accumulation
        if accumulation.before_backward():
            if early is not None:
                early.discard()
            self.compute.backward(None if early is None or accumulation.adds else early.start)
        elif early is not None and not accumulation.adds:
            early.start_nothing()
        accumulation.after_backward()

    def look_at_labels(self, mu_obs: Any, selected_idx: Any) -> None:
        """Warn if the labels of the last forward pass, and of many before, are sorted."""
        if self.labels is not None and not self.labels.look(
            self.compute.samples, mu_obs, selected_idx
        ):
            self.labels = None

    def end_step(self) -> None:
        """Keep the state of a step that was made."""
        self.rollback.drop()

    def undo(self) -> None:
        """Drop the deltas of the present step, and restore the other state that it has changed."""
        self.accumulation.discard()
        self.rollback.restore()

    def undo_misfit(self) -> None:
        """Restore the buffer that an innovation of the wrong size has replaced."""
        if self.misfit is not None:
            self.compute.input_delta_z_buffer, self.misfit = self.misfit[1], None
