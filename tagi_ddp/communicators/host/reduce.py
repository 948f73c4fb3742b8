"""Reduction of rows in the order of the ranks: the same bits wherever it is done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tagi_ddp.communicators.communicator import ReduceOp


def reduce_rows(rows: Sequence[np.ndarray], dtype: str, op: ReduceOp, out: np.ndarray) -> None:
    """Reduce ``rows``, one per rank, into ``out``, all of ``dtype`` and of one length.

    16-bit floats accumulate in float32 and are rounded once; bfloat16 comes and goes as uint16.
    """
    combine = {"min": np.minimum, "max": np.maximum}.get(op, np.add)
    with np.errstate(all="ignore"):  # infinities and NaN are the caller's business
        first, *others = rows
        so_far = _widen(first, dtype)
        total = out if so_far is first else so_far
        for row in others:
            combine(so_far, _widen(row, dtype), out=total)
            so_far = total
        if so_far is not total:  # of a single row
            total[...] = so_far
        if op == "mean":
            np.divide(total, len(rows), out=total)
        if total is not out:
            out[...] = _narrow(total, dtype)


def _widen(row: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return row.astype(np.float32)
    if dtype == "bfloat16":
        return (row.astype(np.uint32) << 16).view(np.float32)
    return row


def _narrow(total: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return total.astype(np.float16)
    bits = total.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    quiet = (bits >> 16) | 0x40  # rounding could turn a NaN into an infinity
    return np.where(np.isnan(total), quiet, rounded).astype(np.uint16)
