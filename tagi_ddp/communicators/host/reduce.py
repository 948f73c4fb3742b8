"""Reduction of rows in the order of the ranks: the same bits wherever it is done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tagi_ddp.communicators.communicator import ReduceOp


def reduce_rows(
    rows: Sequence[np.ndarray], dtype: str, op: ReduceOp, out: np.ndarray, ranks: int
) -> None:
    """Reduce ``rows``, of one length, into ``out`` of ``dtype``; they stand for so many ``ranks``.

    16-bit floats accumulate in float32, if they do not come as such, and are rounded once; bfloat16
    comes and goes as uint16.
    """
    with np.errstate(all="ignore"):  # infinities and NaN are the caller's business
        first, *others = rows
        so_far = widen(first, dtype)
        total = out if so_far.dtype == out.dtype else np.empty_like(so_far)
        for row in others:
            combine(op)(so_far, widen(row, dtype), out=total)
            so_far = total
        if so_far is not total:  # of a single row
            total[...] = so_far
        result = finish(total, dtype, op, ranks)
        if result is not out:
            out[...] = result


def combine(op: ReduceOp) -> np.ufunc:
    """Return what reduces two arrays; a mean is a sum until `finish`."""
    return {"min": np.minimum, "max": np.maximum}.get(op, np.add)


def partial_op(op: ReduceOp) -> ReduceOp:
    """Return by what some of the ranks reduce: a mean is a sum until `finish`."""
    return "sum" if op == "mean" else op


def finish(total: np.ndarray, dtype: str, op: ReduceOp, ranks: int) -> np.ndarray:
    """Return as ``dtype`` what follows from what ``ranks`` ranks have added up, which is lost."""
    if op == "mean":
        np.divide(total, ranks, out=total)
    return _narrow(total, dtype) if dtype in ("float16", "bfloat16") else total


def widen(row: np.ndarray, dtype: str) -> np.ndarray:
    """Return 16-bit floats as float32, and all else as it is."""
    if dtype == "float16":
        return row.astype(np.float32, copy=False)
    if dtype == "bfloat16" and row.dtype == np.uint16:
        return (row.astype(np.uint32) << 16).view(np.float32)
    return row


def _narrow(total: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        with np.errstate(all="ignore"):  # infinities and NaN are the caller's business
            return total.astype(np.float16)
    bits = total.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    quiet = (bits >> 16) | 0x40  # rounding could turn a NaN into an infinity
    return np.where(np.isnan(total), quiet, rounded).astype(np.uint16)
