"""Options of the engine's layers that it does not expose, read from their memory.

Offsets are relative to the end of the base class, and are verified on test layers.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace
from typing import Any

from tagi_ddp._backend import batch_norm_statistics
from tagi_ddp.engine.layout import batch_norm_address, find_layout, read_memory
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.engine.pointers import LayoutError, address_of, layout_errors

# In LSTM the size of a batch, three numbers, the name of the initialisation and eight positions.
_LAST_STEP = 4 * 4 + 32 + 8 * 4
# Vectors precede it: of the shape, and of means and variances, or of squares.
_EPSILON = {"LayerNorm": 3 * 24, "RMSNorm": 2 * 24}
# Offsets of the kernel's size, the stride, the type of padding and the padding. In convolutions the
# gains and the name of the initialisation precede them.
WINDOWS = {"Conv2d": 40, "ConvTranspose2d": 32, "AvgPool2d": 0, "MaxPool2d": 0}


def batch_norm_options(handle: Any) -> tuple[float, float]:
    """Return epsilon and momentum of a BatchNorm2d whose replica is in the engine's memory."""
    _, _, epsilon, momentum, _ = batch_norm_statistics(batch_norm_address(handle))
    return float(epsilon), float(momentum)


def norm_epsilon(handle: Any) -> float:
    """Return epsilon of a LayerNorm or RMSNorm; LayoutError if it is not where it should be."""
    kind = type(handle).__name__
    verify_epsilon(kind)
    return _epsilon_of(handle, kind)


@functools.cache
@layout_errors()
def verify_epsilon(kind: str) -> None:
    """Raise LayoutError if epsilon of LayerNorm or RMSNorm is not where it should be."""
    load_engine()
    import cutagi

    for size, epsilon in ((5, 0.125), (3, 0.375)):
        if _epsilon_of(getattr(cutagi, kind)([size], epsilon), kind) != epsilon:
            raise LayoutError(f"{kind}'s epsilon is not where it should be")


def _epsilon_of(handle: Any, kind: str) -> float:
    return float(_fields(handle, _EPSILON[kind], "f")[0])


def _fields(handle: Any, offset: int, kinds: str) -> tuple[Any, ...]:
    """Return the fields of the kinds of `struct` at an offset from the end of the base class."""
    size = struct.calcsize(kinds)
    data = read_memory(address_of(handle) + find_layout().end + offset, size)
    if len(data) < size:
        raise LayoutError(f"the fields of {type(handle).__name__} are not where they should be")
    return struct.unpack(kinds, data)


def returns_last_step(handle: Any) -> bool:
    """Return whether an LSTM has outputs of a sample's last step only, in engines with sequences.

    Raises LayoutError if the option is not where it should be.
    """
    _verify_last_step()
    return bool(_fields(handle, _LAST_STEP, "?")[0])


@functools.cache
@layout_errors()
def _verify_last_step() -> None:
    load_engine()
    import cutagi

    for last in (True, False):
        lstm = cutagi.LSTM(0, 0, last_timestep=last, seq_len=2, bias=True)
        if _fields(lstm, _LAST_STEP, "?") != (last,):
            raise LayoutError("LSTM's last_timestep is not where it should be")


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


def window_of(handle: Any) -> Window:
    """Return the window of an engine's Conv2d, ConvTranspose2d, AvgPool2d or MaxPool2d.

    Raises LayoutError if it is not where it should be, and ValueError for a padding that is
    undefined in the engine.
    """
    kind = type(handle).__name__
    verify_windows(kind)
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
    return Window(*_fields(handle, WINDOWS[type(handle).__name__], "Niii"))


@functools.cache
@layout_errors()
def verify_windows(kind: str) -> None:
    """Raise LayoutError if the window of a kind of layer is not where it should be."""
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
