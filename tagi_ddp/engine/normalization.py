"""Options of the engine's normalization layers that it does not expose."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from tagi_ddp._backend import batch_norm_statistics
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.engine.pointers import LayoutError, address_of

# After the base's 344 bytes: three vectors (the shape, means, variances), then the epsilon.
_LAYER_NORM_EPSILON = 344 + 3 * 24


def batch_norm_options(handle: Any) -> tuple[float, float]:
    """Return epsilon and momentum of a BatchNorm2d whose replica is in the engine's memory."""
    _, _, epsilon, momentum, _ = batch_norm_statistics(address_of(handle))
    return float(epsilon), float(momentum)


def layer_norm_epsilon(handle: Any) -> float:
    """Return epsilon of a LayerNorm; raise LayoutError if it is not where it should be."""
    _check_layer_norm()
    return _epsilon_of(handle)


@functools.cache
def _check_layer_norm() -> None:
    load_engine()
    import cutagi

    for shape, epsilon in (([5], 0.125), ([3, 2, 2], 0.375)):
        if _epsilon_of(cutagi.LayerNorm(shape, epsilon, True)) != epsilon:
            raise LayoutError("LayerNorm's epsilon is not where it should be")


def _epsilon_of(handle: Any) -> float:
    return ctypes.c_float.from_address(address_of(handle) + _LAYER_NORM_EPSILON).value
