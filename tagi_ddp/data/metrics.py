"""What the ranks have found, put together: exact means, and rows in the data set's order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.objects import all_gather_object


def reduce_metrics(
    comm: Communicator, total: npt.ArrayLike, count: int
) -> float | npt.NDArray[np.float64]:
    """Return the exact mean over all ranks' samples: the sum of totals over the sum of counts.

    A mean of the ranks' means would be wrong where they saw different numbers of samples.

    Args:
        comm: the ranks, all of which call this.
        total: this rank's sum over its samples, one number or an array of several metrics (the same
            shape on all ranks); zeros on a rank that saw none. Added up in float64.
        count: how many samples this rank saw.

    Returns:
        the means as a float, or a float64 array of ``total``'s shape; the same bits on all ranks.

    Raises:
        ValueError: no rank saw a sample (on all ranks), or ``count`` is negative.
    """
    totals = np.array(total, dtype=np.float64)
    counts = np.array([integer("count", count, 0)], dtype=np.int64)
    comm.all_reduce(totals)
    comm.all_reduce(counts)
    if counts[0] == 0:
        raise ValueError("count is 0 on all ranks: there is no mean of no samples")
    mean = totals / counts[0]
    return mean if totals.ndim else float(mean)


def gather(
    comm: Communicator, rows: npt.ArrayLike, indices: npt.ArrayLike | None = None
) -> npt.NDArray[Any]:
    """Return the rows of all ranks, on all ranks: predictions of a whole data set, for example.

    ``gather(model.communicator, mean, np.concatenate(sampler.batches(500)))`` puts the predictions
    for this rank's shares into the data set's order.

    Args:
        comm: the ranks, all of which call this.
        rows: this rank's, numbers of one dtype and of one shape [its rows, ...] but for the first
            dimension, which may differ between ranks, and be 0.
        indices: the place of each row in the result, one int for each row; None: the rows are in
            the ranks' order. Where ranks have the same place, as samplers pad, the last one counts.

    Returns:
        [all rows, ...], or [1 + the greatest index, ...].

    Raises:
        ValueError: on all ranks: dtypes or shapes differ, there are more or fewer indices than
            rows, or no rank has a row for a place.
    """
    own = np.atleast_1d(np.asarray(rows))
    places = None if indices is None else np.asarray(indices, np.int64).ravel()
    problem = ""
    if own.dtype.kind not in "biuf":
        problem = f"rows must be numbers, got {own.dtype}"
    elif places is not None and len(places) != len(own):
        problem = f"indices has {len(places)} numbers for {len(own)} rows"
    elif places is not None and (places < 0).any():
        problem = f"indices must not be negative, got {places.min()}"
    told = [problem, str(own.dtype), list(own.shape[1:]), len(own), indices is None]
    everyone = all_gather_object(comm, told)
    for rank, (text, *_) in enumerate(everyone):
        if text:
            raise ValueError(f"rank {rank}: {text}")
    for part, name in ((1, "dtypes of rows"), (2, "shapes of rows"), (4, "uses of indices")):
        found = [each[part] for each in everyone]
        if any(each != found[0] for each in found):
            raise ValueError(f"{name} differ between ranks: {found}")
    counts = [int(each[3]) for each in everyone]
    whole = _joined(comm, own, counts)
    if places is None:
        return whole
    order = _joined(comm, places, counts)
    size = int(order.max(initial=-1)) + 1
    there = np.zeros(size, bool)
    there[order] = True
    if not there.all():
        raise ValueError(f"indices leave out {int(np.argmin(there))}: no rank has a row for it")
    result = np.empty((size, *whole.shape[1:]), whole.dtype)
    result[order] = whole
    return result


def _joined(comm: Communicator, own: npt.NDArray[Any], counts: list[int]) -> npt.NDArray[Any]:
    """Return the rows of all ranks, one after another."""
    width = int(np.prod(own.shape[1:], dtype=np.int64))
    whole = np.empty(sum(counts) * width, own.dtype)
    comm.all_gather(
        np.ascontiguousarray(own).reshape(-1), whole, [count * width for count in counts]
    )
    return whole.reshape(sum(counts), *own.shape[1:])
