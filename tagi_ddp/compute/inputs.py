"""The inputs of a forward pass, checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp.checks import flat_floats, require_rows, require_variances, shape_of
from tagi_ddp.engine.buffers import Shown, read_states


@dataclass(frozen=True)
class Inputs:
    """A check of inputs against the shape of a sample."""

    sample: tuple[int, ...]

    def take(
        self, mu_x: ArrayLike, var_x: ArrayLike | None, keep_tensors: bool
    ) -> tuple[Any, Any, Shown | None]:
        """Return means and variances, flat, and the hidden states if ``mu_x`` holds some."""
        shown = None
        if type(mu_x) is not np.ndarray and hasattr(mu_x, "mu_a"):
            shown = read_states(mu_x)
        else:
            shape = shape_of(mu_x)
            if shape[1:] != self.sample:
                require_rows("mu_x", shape, self.sample)
        mean = flat_floats("mu_x", mu_x, keep_tensors) if shown is None else shown.mean
        if var_x is None:
            return mean, None, shown
        require_rows("var_x", shape_of(var_x), self.sample)
        variance = flat_floats("var_x", var_x, keep_tensors)
        if len(variance) != len(mean):
            raise ValueError(
                f"var_x has {len(variance)} elements, mu_x {len(mean)}; give one variance for "
                "each mean"
            )
        require_variances("var_x", variance)
        return mean, variance, shown
