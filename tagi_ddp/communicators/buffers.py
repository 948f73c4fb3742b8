"""What the Python communicators accept as buffers and arguments, and the checks of both."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from tagi_ddp.communicators.communicator import Buffer, ReduceOp

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


@dataclass(frozen=True)
class Elements:
    """The elements of a buffer: their number, and where its own memory begins."""

    dtype: str
    count: int
    address: int

    @property
    def end(self) -> int:
        """The address behind the last element."""
        return self.address + self.count * item_size(self.dtype)

    def __str__(self) -> str:
        """Return for example "float32[8]"."""
        return f"{self.dtype}[{self.count}]"


@dataclass(frozen=True)
class HostElements(Elements):
    """Elements in host memory, as a flat array too.

    ``array`` has shape [count]; numpy has no bfloat16, so there it holds the bits as uint16.
    """

    array: np.ndarray

    @classmethod
    def of(cls, dtype: str, flat: np.ndarray) -> HostElements:
        """Return the elements of a flat array."""
        return cls(dtype, flat.size, flat.ctypes.data, flat)


def item_size(dtype: str) -> int:
    """Return the bytes of one element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def elements(buffer: Buffer, name: str, *, writable: bool = False) -> HostElements:
    """Return the elements of the argument called ``name``, sharing its memory.

    Raises:
        TypeError: it is neither a numpy array nor a torch tensor, or its dtype is not supported.
        ValueError: it is not C-contiguous, not on the CPU, or read-only though ``writable``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _tensor_elements(buffer, name, torch)
    if not isinstance(buffer, np.ndarray):
        raise TypeError(
            f"{name} must be a numpy array or a torch tensor, got {type(buffer).__name__}"
        )
    dtype = buffer.dtype.name
    if dtype not in FLOATS + INTEGERS or not buffer.dtype.isnative:
        raise TypeError(unsupported(name, str(buffer.dtype)))
    if not buffer.flags.c_contiguous:
        raise ValueError(not_contiguous(name, "numpy.ascontiguousarray()"))
    if writable and not buffer.flags.writeable:
        raise ValueError(f"{name} is read-only, but the result is written to it; pass a copy")
    flat = buffer.reshape(-1)
    return HostElements.of(dtype, flat.view(np.uint16) if dtype == "bfloat16" else flat)


def _tensor_elements(tensor: Any, name: str, torch: Any) -> HostElements:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in FLOATS + INTEGERS:
        raise TypeError(unsupported(name, dtype))
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} lives on {tensor.device}, but this communicator's buffers live on the cpu"
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(not_contiguous(name, ".contiguous()"))
    flat = tensor.detach().reshape(-1)
    if dtype == "bfloat16":
        return HostElements.of(dtype, flat.view(torch.int16).numpy().view(np.uint16))
    return HostElements.of(dtype, flat.numpy())


def unsupported(name: str, dtype: str) -> str:
    """Return what is wrong with a buffer of this dtype."""
    return f"{name} has dtype {dtype}; supported are {', '.join(FLOATS + INTEGERS)}"


def not_contiguous(name: str, remedy: str) -> str:
    """Return what is wrong with a buffer that is strided."""
    return f"{name} is not C-contiguous; pass {remedy} of it"


def check_result(source: Elements, out: Elements, expected: int, *, in_place: bool = False) -> None:
    """Check that ``out`` has the dtype of ``buffer``, ``expected`` elements and its own memory."""
    if out.dtype != source.dtype:
        raise TypeError(f"out has dtype {out.dtype}, but buffer has {source.dtype}")
    if out.count != expected:
        raise ValueError(f"out has {out.count} elements, but {expected} will be written")
    same = in_place and source.address == out.address
    if not same and source.address < out.end and out.address < source.end:
        raise ValueError("out overlaps buffer; pass memory of its own")


def check_op(op: ReduceOp, dtype: str) -> None:
    """Check that ``op`` is known and fits ``dtype``."""
    if op not in get_args(ReduceOp):
        raise ValueError(f"op must be one of {', '.join(get_args(ReduceOp))}, got {op!r}")
    if op == "mean" and dtype not in FLOATS:
        raise TypeError(f"op='mean' takes floats only, but buffer has dtype {dtype}")


def check_counts(
    counts: Sequence[int] | None, name: str, size: int, total: int, whole: str
) -> list[int]:
    """Return ``counts`` as a list of ``size`` integers whose sum is ``total``.

    None shares ``total`` equally. ``whole`` names the buffer that has ``total`` elements.
    """
    if counts is None:
        if total % size:
            raise ValueError(
                f"{whole} has {total} elements, which {size} ranks cannot share equally; "
                f"pass {name}"
            )
        return [total // size] * size
    values = [check_integer(count, name) for count in counts]
    if len(values) != size:
        raise ValueError(f"{name} must hold one count per rank ({size}), got {len(values)}")
    if min(values) < 0:
        raise ValueError(f"{name} must not be negative, got {min(values)}")
    if sum(values) != total:
        raise ValueError(f"{name} add up to {sum(values)}, but {whole} has {total} elements")
    return values


def check_integer(value: Any, name: str) -> int:
    """Return ``value`` as an int; bool and float are refused."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def check_rank(value: Any, name: str, size: int) -> int:
    """Return ``value`` as a rank of the group."""
    rank = check_integer(value, name)
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be a rank from 0 to {size - 1}, got {rank}")
    return rank


def check_timeout(value: Any, name: str = "timeout") -> float:
    """Return ``value`` as a positive finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive, finite number of seconds, got {value!r}")
    return float(value)
