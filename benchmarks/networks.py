"""The networks of the benchmarks, and the proof that two of them did the same work."""

from __future__ import annotations

import numpy as np
import pytagi
from pytagi.nn import Linear, ReLU, Sequential

INPUTS = 784
OUTPUTS = 11


def mlp(hidden: int) -> Sequential:
    """Return 784-hidden-hidden-11, with the same parameters at every call."""
    pytagi.manual_seed(0)
    return Sequential(
        Linear(INPUTS, hidden), ReLU(), Linear(hidden, hidden), ReLU(), Linear(hidden, OUTPUTS)
    )


def require_equal(one: Sequential, other: Sequential) -> None:
    """Raise unless the means and variances agree to 1e-4 of their norm."""
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name in ("mu_w", "var_w", "mu_b", "var_b"):
            a, b = (np.array(getattr(layer, name), np.float32) for layer in (mine, theirs))
            if np.linalg.norm(a - b) > 1e-4 * np.linalg.norm(b):
                raise RuntimeError(f"{mine.get_layer_info()}: {name} differs; not the same work")
