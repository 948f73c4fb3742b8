"""Buffers and arguments of the communicators written in Python, and their checks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, get_args

import numpy as np

from tagi_ddp.checks import integer
from tagi_ddp.checks import rank as rank_of
from tagi_ddp.communicators.communicator import Buffer, ReduceOp

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_END = 1 << 31  # the end of C's int
_OPS = get_args(ReduceOp)
_NAMES = {np.dtype(name): name for name in FLOATS + INTEGERS if name != "bfloat16"}


@dataclass
class Elements:
    """The elements of a buffer: dtype, number and address."""

    dtype: str
    count: int
    address: int

    @property
    def end(self) -> int:
        """The address after the last element."""
        size = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return self.address + self.count * size

    def __str__(self) -> str:
        """Return for example "float32[8]"."""
        return f"{self.dtype}[{self.count}]"


@dataclass
class HostElements(Elements):
    """Elements in host memory, also as a flat array.

    ``array`` has shape [count]. It holds bfloat16, which numpy lacks, as uint16.
    """

    array: np.ndarray

    @classmethod
    def of(cls, dtype: str, flat: np.ndarray) -> HostElements:
        """Return the elements of a flat array."""
        return cls(dtype, flat.size, flat.ctypes.data, flat)

    @property
    def end(self) -> int:
        return self.address + self.array.nbytes


def elements(buffer: Buffer, name: str, *, writable: bool = False) -> HostElements:
    """Return the elements of the argument called ``name``, sharing its memory.

    Raises:
        TypeError: it is neither a numpy array nor a torch tensor, or its dtype is not supported.
        ValueError: it is not C-contiguous or aligned, not on the CPU, or read-only though
            ``writable``.
    """
    if not isinstance(buffer, np.ndarray):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(buffer, torch.Tensor):
            return _tensor_elements(buffer, name, torch)
        raise TypeError(
            f"{name} is a {type(buffer).__name__} that gives no numeric array; pass a numpy array "
            "or a torch tensor"
        )
    kind = buffer.dtype
    dtype = _NAMES.get(kind)
    if dtype is None:
        if kind.name != "bfloat16" or not kind.isnative:  # Packages add it to numpy.
            raise TypeError(unsupported(name, str(kind)))
        dtype = kind.name
    flags = buffer.flags
    if not (flags.c_contiguous and flags.aligned and (flags.writeable or not writable)):
        raise ValueError(unfit(name, flags.c_contiguous, flags.aligned))
    flat = buffer.reshape(-1)
    return HostElements.of(dtype, flat.view(np.uint16) if dtype == "bfloat16" else flat)


def _tensor_elements(tensor: Any, name: str, torch: Any) -> HostElements:
    if tensor.device.type != "cpu":
        raise ValueError(
            f'{name} is not in host memory, but the communicator\'s device is "cpu"; copy it to '
            "the host first"
        )
    dtype = dtype_of_tensor(tensor, name, torch)
    flat = tensor.detach().reshape(-1)
    if dtype == "bfloat16":
        return HostElements.of(dtype, flat.view(torch.int16).numpy().view(np.uint16))
    return HostElements.of(dtype, flat.numpy())


def dtype_of_tensor(tensor: Any, name: str, torch: Any) -> str:
    """Return the dtype of a tensor; raise TypeError or ValueError unless it can be sent."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in FLOATS + INTEGERS:
        raise TypeError(unsupported(name, dtype))
    contiguous = tensor.layout == torch.strided and tensor.is_contiguous()
    if not contiguous or tensor.data_ptr() % tensor.element_size():
        raise ValueError(unfit(name, contiguous, aligned=False))
    return dtype


# Error texts, the same as those of shm's bindings.


def unsupported(name: str, dtype: str) -> str:
    """Return the error text of a buffer whose dtype is not supported."""
    return (
        f"{name} has dtype {dtype}, which cannot be sent; use {', '.join(FLOATS)} or an integer "
        "of 8 to 64 bits"
    )


def unfit(name: str, contiguous: bool, aligned: bool) -> str:
    """Return the error text of a buffer that is strided, misaligned, or else read-only."""
    if not contiguous:
        return (
            f"{name} is not C-contiguous; pass a contiguous copy, as numpy.ascontiguousarray makes"
        )
    what = "read-only, but is written to" if aligned else "not aligned to its dtype"
    return f"{name} is {what}; pass a copy"


# Checks of arguments.


def check_result(source: Elements, out: Elements, expected: int, *, in_place: bool = False) -> None:
    """Check that ``out`` has the dtype of ``buffer``, ``expected`` elements and its own memory."""
    if out.dtype != source.dtype:
        raise TypeError(f"out has dtype {out.dtype}, expected {source.dtype}")
    check_count(out, "out", expected)
    same = in_place and source.address == out.address
    if not same and source.address < out.end and out.address < source.end:
        remedy = "memory of its own, or the same array" if in_place else "memory of its own"
        raise ValueError(f"out and buffer overlap; pass {remedy}")


def check_count(elements: Elements, name: str, expected: int) -> None:
    """Check the number of elements of the argument called ``name``."""
    if elements.count != expected:
        raise ValueError(f"{name} has {elements.count} elements, expected {expected}")


def check_op(op: ReduceOp, dtype: str) -> None:
    """Check that ``op`` is known and fits ``dtype``."""
    if op not in _OPS:
        raise ValueError(f'op is "{op}"; use "sum", "mean", "min" or "max"')
    if op == "mean" and dtype not in FLOATS:
        raise TypeError(
            f'op is "mean", which is not defined for {dtype}; use "sum" or a float dtype'
        )


def check_color(color: int | None) -> int | None:
    """Check the range, MPI's, of a color of `split`, and return it; None leaves a rank out."""
    if color is None:
        return None
    color = integer("color", color)
    if color < 0:
        raise ValueError(
            f"color is {color}, but colors are not negative; None leaves this rank out"
        )
    if color >= _END:
        raise ValueError(f"color is {color}, but colors are below {_END}")
    return color


def check_integer(name: str, value: int) -> int:
    """Check the range, MPI's, of a key of `split` or a tag, and return it."""
    number = integer(name, value)
    if not -_END <= number < _END:
        raise ValueError(f"{name} is {number}, but {name}s go from {-_END} to {_END - 1}")
    return number


def check_other(name: str, peer: int, rank: int, size: int, verb: str) -> None:
    """Check that ``peer``, of a message, is another rank of ``size`` than ``rank``."""
    if rank_of(name, peer, size) == rank:
        raise ValueError(f"{name} is this rank itself; {verb} another rank")


def check_counts(
    counts: Sequence[int] | None, name: str, size: int, whole: Elements, whole_name: str
) -> list[int]:
    """Return ``counts`` as a list of ``size`` integers that add up to the elements of ``whole``.

    None: equally many for each.
    """
    if counts is None:
        if whole.count % size:
            raise ValueError(
                f"{whole_name} has {whole.count} elements, which {size} ranks cannot share evenly; "
                f"give {name}"
            )
        return [whole.count // size] * size
    values = [integer(name, count) for count in counts]
    if negative := [value for value in values if value < 0]:
        raise ValueError(f"{name} holds {negative[0]}; counts of elements are not negative")
    if len(values) != size:
        raise ValueError(f"{name} has {len(values)} entries, expected one for each of {size} ranks")
    check_count(whole, whole_name, sum(values))
    return values


def equal_counts(total: int, ranks: int) -> list[int]:
    """Return each rank's share of ``total`` elements; the first ranks may get one more."""
    each, more = divmod(total, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def cut(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Return consecutive views of a flat array, of ``counts`` elements."""
    ends = accumulate(counts, initial=0)
    return [array[begin:end] for begin, end in pairwise(ends)]
