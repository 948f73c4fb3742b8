"""Reductions of numpy arrays that give the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from tagi_ddp.communicators.communicator import ReduceOp

_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}
Restore = Callable[[np.ndarray], np.ndarray]


def reduce_rows(
    rows: Sequence[np.ndarray], dtype: str, op: ReduceOp, out: np.ndarray, ranks: int
) -> None:
    """Reduce ``rows``, of one length, in their order into ``out`` of ``dtype``.

    A mean divides by ``ranks``. 16-bit floats accumulate in float32, and are rounded once; bfloat16
    is stored as uint16.
    """
    with np.errstate(all="ignore"):  # Infinities and NaN concern the caller.
        first, *others = rows
        so_far = widen(first, dtype)
        total = out if so_far.dtype == out.dtype else np.empty_like(so_far)
        for row in others:
            _UFUNCS[op](so_far, widen(row, dtype), out=total)
            so_far = total
        if so_far is not total:  # There is a single row.
            total[...] = so_far
        result = finish(total, dtype, op, ranks)
        if result is not out:
            out[...] = result


def partial_op(op: ReduceOp) -> ReduceOp:
    """Return the operation for a part of the ranks: a mean is a sum until `finish`."""
    return "sum" if op == "mean" else op


def finish(total: np.ndarray, dtype: str, op: ReduceOp, ranks: int) -> np.ndarray:
    """Return the result as ``dtype``, from ``total`` of ``ranks`` ranks, which is overwritten."""
    if op == "mean":
        np.divide(total, ranks, out=total)
    return _narrow(total, dtype) if dtype in ("float16", "bfloat16") else total


def widen(row: np.ndarray, dtype: str) -> np.ndarray:
    """Return 16-bit floats as float32, and other dtypes unchanged."""
    if dtype == "float16":
        return row.astype(np.float32, copy=False)
    if dtype == "bfloat16" and row.dtype == np.uint16:
        return (row.astype(np.uint32) << 16).view(np.float32)
    return row


def _narrow(total: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        with np.errstate(all="ignore"):  # Infinities and NaN concern the caller.
            return total.astype(np.float16)
    bits = total.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    quiet = (bits >> 16) | 0x40  # Rounding could turn a NaN into an infinity.
    return np.where(np.isnan(total), quiet, rounded).astype(np.uint16)


# Reductions by a library.


def encode(array: np.ndarray, op: ReduceOp, known: Collection[str]) -> tuple[np.ndarray, Restore]:
    """Return numbers that a library reduces instead of ``array``, and a decoder of the result.

    Minima and maxima of floats are those of integers in the same order, with NaN before or after
    all others: a library may give each rank another NaN. An integer type that is not among the
    ``known`` dtypes of the library is converted to a wider or a signed one.
    """
    floats = array.dtype.kind == "f"
    if floats and op in ("min", "max"):
        bits = _ordered(array.view(f"int{8 * array.itemsize}"))
        bits[np.isnan(array)] = getattr(np.iinfo(bits.dtype), op)
        return bits, lambda found: _ordered(found).view(array.dtype)
    if floats or array.dtype.name in known:
        return array, lambda found: found
    if array.itemsize < 8:
        wider = "int32" if array.itemsize < 4 else "int64"
        return array.astype(wider), lambda found: found.astype(array.dtype)
    top = np.uint64(0 if op in ("sum", "mean") else 1 << 63)  # The signed order is the same.
    return (array ^ top).view(np.int64), lambda found: found.view(np.uint64) ^ top


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Map the bits of floats to integers in the same order, and back."""
    ordered: np.ndarray = bits ^ ((bits >> (8 * bits.itemsize - 1)) & np.iinfo(bits.dtype).max)
    return ordered


def same_nan(total: np.ndarray) -> None:
    """Make every NaN the same one: a library may give each rank another."""
    if total.dtype.kind != "f":
        return
    with np.errstate(all="ignore"):
        if np.isnan(np.dot(total, total)):  # The square of an infinity is none.
            total[np.isnan(total)] = np.nan
