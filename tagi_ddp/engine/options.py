"""Options of the engine's layers that it does not expose, read from their memory.

As in `pointers`, the layout is an assumption about another project's binary, and is verified before
it is used.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import Any

from tagi_ddp._backend import batch_norm_statistics
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.engine.pointers import LayoutError, address_of, layout_errors, verify_layout

# The base has 344 bytes. In LayerNorm three vectors precede the epsilon: shape, means, variances.
_LAYER_NORM_EPSILON = 344 + 3 * 24
# Offsets of {size_t kernel; int stride, padding_type, padding;}. In Conv2d two gains and the name
# of the initialisation precede the fields too.
_OFFSETS = {"Conv2d": 384, "ConvTranspose2d": 376, "AvgPool2d": 344, "MaxPool2d": 344}


def batch_norm_options(handle: Any) -> tuple[float, float]:
    """Return epsilon and momentum of a BatchNorm2d whose replica is in the engine's memory."""
    _, _, epsilon, momentum, _ = batch_norm_statistics(address_of(handle))
    return float(epsilon), float(momentum)


def layer_norm_epsilon(handle: Any) -> float:
    """Return epsilon of a LayerNorm; raise LayoutError if it is not where it should be."""
    _verify_layer_norm()
    return _epsilon_of(handle)


@functools.cache
@layout_errors()
def _verify_layer_norm() -> None:
    load_engine()
    import cutagi

    for shape, epsilon in (([5], 0.125), ([3, 2, 2], 0.375)):
        if _epsilon_of(cutagi.LayerNorm(shape, epsilon, True)) != epsilon:
            raise LayoutError("LayerNorm's epsilon is not where it should be")


def _epsilon_of(handle: Any) -> float:
    return ctypes.c_float.from_address(address_of(handle) + _LAYER_NORM_EPSILON).value


@dataclass(frozen=True)
class Window:
    """A square window that slides over an image."""

    kernel: int
    stride: int
    padding_type: int
    padding: int

    @property
    def before(self) -> int:
        """The rows above and columns to the left of the image; only type 1 pads there."""
        return self.padding if self.padding_type == 1 else 0

    @property
    def after(self) -> int:
        """The rows below and columns to the right of the image."""
        return self.padding

    @property
    def extra(self) -> int:
        """The additional padding on the right and at the bottom."""
        return self.after - self.before


class _Fields(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_size_t),
        ("stride", ctypes.c_int),
        ("padding_type", ctypes.c_int),
        ("padding", ctypes.c_int),
    )


def window_of(handle: Any) -> Window:
    """Return the window of an engine's Conv2d, ConvTranspose2d, AvgPool2d or MaxPool2d.

    Raises LayoutError if it is not where it should be, and ValueError for a padding that is
    undefined in the engine.
    """
    kind = type(handle).__name__
    _verify_windows(kind)
    window = _read(handle)
    if window.stride < 1:  # Without a stride, windows adjoin.
        window = replace(window, stride=window.kernel)
    if window.padding_type not in (1, 2) and (window.padding or kind == "ConvTranspose2d"):
        raise ValueError(
            f"{handle.get_layer_info()} has padding {window.padding} of type "
            f"{window.padding_type}; use padding_type 1 (all sides) or 2 (right and bottom)"
        )
    small, large = handle.out_width, handle.in_width
    if kind == "ConvTranspose2d":
        small, large = large, small
    if large and (small - 1) * window.stride != (
        large + window.before + window.after - window.kernel
    ):
        raise LayoutError(f"the window of {handle.get_layer_info()} is not where it should be")
    return window


def _read(handle: Any) -> Window:
    address = address_of(handle) + _OFFSETS[type(handle).__name__]
    fields = _Fields.from_address(address)
    return Window(fields.kernel, fields.stride, fields.padding_type, fields.padding)


@functools.cache
@layout_errors()
def _verify_windows(kind: str) -> None:
    """Verify the offsets of the fields on test layers, once per process."""
    verify_layout()
    load_engine()
    import cutagi

    for expected in (Window(5, 3, 2, 7), Window(11, 13, 1, 4)):
        sizes = (1, 1) if kind.startswith("Conv") else ()
        bias = (True,) if kind.startswith("Conv") else ()
        layer = getattr(cutagi, kind)(
            *sizes,
            expected.kernel,
            *bias,
            expected.stride,
            expected.padding,
            expected.padding_type,
        )
        if _read(layer) != expected:
            raise LayoutError(f"{kind}'s window is not where it should be")
