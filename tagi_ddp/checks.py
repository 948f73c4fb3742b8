"""Checks of arguments that several modules share."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp._backend import are_variances

_DLPACK_HOST = 1  # the number of the host among the kinds of device
FLOAT32 = np.dtype(np.float32)  # kept, as numpy would look it up for each call


def integer(name: str, value: Any, low: int | None = None) -> int:
    """Return ``value`` as an int of at least ``low``; numpy's integers pass, bools do not.

    Raises TypeError or ValueError that names the argument and what it got.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if low is not None and number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    return number


def real(name: str, value: Any) -> float:
    """Return ``value`` as a float; numbers pass, also numpy's, bools and strings do not.

    Raises TypeError that names the argument and what it got.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{name} must be a number, got {value!r}")


def rank(name: str, value: Any, size: int) -> int:
    """Return ``value`` as a rank of a group of ``size``; raise as `integer` does."""
    number = integer(name, value)
    if not 0 <= number < size:
        raise ValueError(f"{name} is {number}, but ranks go from 0 to {size - 1}")
    return number


def seconds(name: str, value: Any) -> float:
    """Return ``value`` as a positive, finite number of seconds; raise TypeError or ValueError."""
    limit = real(name, value)
    if not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"{name} must be a positive, finite number of seconds, got {limit:g}")
    return limit


def flat_floats(name: str, value: ArrayLike, keep_tensors: bool) -> Any:
    """Return a flat, aligned array of float32; with ``keep_tensors``, a flat tensor for a tensor.

    Masked elements become NaN.
    """
    if type(value) is np.ndarray and value.dtype is FLOAT32 and value.flags.carray:
        return value if value.ndim == 1 else value.reshape(-1)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        value = _from_dlpack(value)
        torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)
        if keep_tensors:
            return flat
        value = flat.cpu().float().numpy()
    try:
        if isinstance(value, np.ma.MaskedArray):  # NaN marks what was not observed.
            value = np.ma.filled(value.astype(np.float32), np.nan)
        array = np.ascontiguousarray(value, dtype=np.float32).reshape(-1)
        return array if array.flags.aligned else array.copy()
    except (TypeError, ValueError) as error:
        got = f"a {type(value).__name__}"
        if isinstance(value, np.ndarray):
            got = f"an array of dtype {value.dtype}"
        raise TypeError(f"{name} must be an array of numbers, got {got}") from error


def _from_dlpack(value: Any) -> Any:
    """Return another library's array as numpy's on the host, and as torch's on a GPU."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return value
    if value.__dlpack_device__()[0] == _DLPACK_HOST:
        return value if hasattr(value, "__array__") else np.from_dlpack(value)
    import torch

    return torch.from_dlpack(value)


def whole_numbers(name: str, value: ArrayLike) -> Any:
    """Return a flat array of int32; raise TypeError or ValueError that names the argument."""
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise ValueError(
            f"{name} has {value.mask.sum()} masked elements: give a number for each observation, "
            "and NaN as the observation where there is none"
        )
    array = np.asarray(value)
    numbers = np.ascontiguousarray(array, np.int32).reshape(-1)
    if array.dtype.kind not in "iu" and (numbers != array.reshape(-1)).any():
        raise TypeError(f"{name} must be whole numbers, got an array of {array.dtype}")
    return numbers


def require_whole_samples(size: int, width: int) -> None:
    """Raise ValueError unless ``size`` elements of mu_x are whole samples of ``width``."""
    if size % width:
        raise ValueError(
            f"mu_x has {size} elements, no multiple of the network's input size, {width}"
        )


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, a tensor or nested lists; () for others."""
    try:
        if type(value) is np.ndarray:
            shape: tuple[int, ...] = value.shape
            return shape
        return tuple(value.shape if hasattr(value, "shape") else np.shape(value))
    except (TypeError, ValueError):  # for example lists of different lengths
        return ()


def require_rows(name: str, shape: tuple[int, ...], sample: Sequence[int]) -> None:
    """Raise ValueError if the rows of an array of this shape cannot be samples of ``sample``.

    A flat array has no rows. The last dimensions of other arrays must be those of a sample, in its
    order. The rows of an array of two dimensions may also be the steps of series.
    """
    if len(shape) < 2 or 0 in shape:
        return
    if len(sample) == len(shape) == 2 and shape[1] == sample[1]:
        return
    width, size, first = math.prod(sample), shape[-1], len(shape) - 1
    while size < width and first:
        first -= 1
        size *= shape[first]
    own, expected = ([n for n in sizes if n != 1] for sizes in (shape[first:], sample))
    if size != width or (own != expected and sorted(own) == sorted(expected)):
        takes = ", ".join(map(str, sample))
        raise ValueError(
            f"{name} has the shape {shape}, but the network takes samples of {width} numbers: give "
            f"an array of the shape (batch, {takes}), or a flat one"
        )


def require_variances(name: str, values: Any, means: Any = None) -> None:
    """Raise ValueError unless flat variances are finite and not negative.

    If one of ``means`` is NaN, its variance is not checked. Tensors on another device than the CPU
    are not checked, as that would wait for the device.
    """
    if not isinstance(values, np.ndarray):
        if values.device.type != "cpu":
            return
        values = np.ascontiguousarray(values.float().numpy())
    if are_variances(values):
        return
    wrong = ~((values >= 0) & np.isfinite(values))
    if means is not None:
        seen = means if isinstance(means, np.ndarray) else means.float().cpu().numpy()
        wrong &= ~np.isnan(seen)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"{name} is {values[index]:g} at element {index}: variances must be finite and not "
            "negative"
        )


# --- arguments of a command line, as types for argparse -------------------------------------------


def count(text: str, low: int = 1) -> int:
    """Return an integer of at least ``low``."""
    if not text.isdecimal() or int(text) < low:
        raise _refusal(f"an integer from {low} up", text)
    return int(text)


def positive(text: str, zero: bool = False) -> float:
    """Return a finite number greater than 0, or, with ``zero``, of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and not zero):
        raise _refusal("a number from 0 up" if zero else "a number greater than 0", text)
    return number


def _refusal(takes: str, text: str) -> Exception:
    from argparse import ArgumentTypeError  # imported here, as scripts do not need it

    return ArgumentTypeError(f"must be {takes}, got {text!r}")
