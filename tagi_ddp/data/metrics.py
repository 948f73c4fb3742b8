"""What the ranks have found, put together: exact means, and rows in the data set's order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Buffer, Communicator
from tagi_ddp.communicators.equality import Entry, require_equal
from tagi_ddp.communicators.init import adopted
from tagi_ddp.communicators.objects import all_gather_object


def reduce_metrics(
    comm: Communicator | Any, total: npt.ArrayLike, count: int
) -> float | npt.NDArray[np.float64]:
    """Return the exact mean over all ranks' samples: the sum of totals over the sum of counts.

    A mean of the ranks' means would be wrong where they saw different numbers of samples.

    Args:
        comm: the ranks, all of which call this; or a group as `as_communicator` takes it, to whose
            ranks each call connects anew.
        total: this rank's sum over its samples, one number or an array of several metrics (the same
            shape on all ranks); zeros on a rank that saw none. Added up in float64.
        count: how many samples this rank saw.

    Returns:
        the means as a float, or a float64 array of ``total``'s shape; the same bits on all ranks.

    Raises:
        ValueError: on all ranks: no rank saw a sample, shapes differ, or a rank has refused an
            argument. That rank's own may be a TypeError.
    """
    totals: npt.NDArray[np.float64]
    samples: int

    def described() -> list[Entry]:
        nonlocal totals, samples
        totals = np.asarray(total, dtype=np.float64)
        samples = integer("count", count, 0)
        return [("the shape of total", str(totals.shape))]

    with adopted(comm) as group:
        remedy = "Give a total of the same shape and a count on all ranks."
        require_equal(group, described, "arguments of reduce_metrics", remedy)
        sums = _placed(group, np.append(totals, samples))
        group.all_reduce(sums)
        sums = _on_host(sums)
    if sums[-1] == 0:
        raise ValueError("count is 0 on all ranks: there is no mean of no samples")
    means: npt.NDArray[np.float64] = (sums[:-1] / sums[-1]).reshape(totals.shape)
    return means if totals.ndim else float(means)


def gather(
    comm: Communicator | Any, rows: npt.ArrayLike, indices: npt.ArrayLike | None = None
) -> npt.NDArray[Any]:
    """Return the rows of all ranks, on all ranks: predictions of a whole data set, for example.

    ``gather(model.communicator, mean, np.concatenate(sampler.batches(500)))`` puts the predictions
    for this rank's shares into the data set's order.

    Args:
        comm: the ranks, all of which call this; or a group as `as_communicator` takes it, to whose
            ranks each call connects anew.
        rows: this rank's, numbers or bools of one dtype and of one shape [its rows, ...] but for
            the first dimension, which may differ between ranks, and be 0.
        indices: the place of each row in the result, one int for each row; None: the rows are in
            the ranks' order. Where ranks have the same place, as samplers pad, the last one counts.

    Returns:
        [all rows, ...], or [1 + the greatest index, ...].

    Raises:
        ValueError: on all ranks: dtypes or shapes differ, there are more or fewer indices than
            rows, no rank has a row for a place, or a rank has refused an argument. That rank's own
            may be a TypeError.
    """
    own: npt.NDArray[Any]
    places: npt.NDArray[np.int64] | None

    def described() -> list[Entry]:
        nonlocal own, places
        own = _numbers(rows)
        places = None if indices is None else _places(indices, len(own))
        return [
            ("the dtype of rows", str(own.dtype)),
            ("the shape of a row", str(own.shape[1:])),
            ("indices", "none" if places is None else "one for each row"),
        ]

    with adopted(comm) as group:
        remedy = "Give rows of one dtype and shape, and indices on all ranks or on none."
        require_equal(group, described, "arguments of gather", remedy)
        counts = all_gather_object(group, len(own))
        whole = _joined(group, own, counts)
        if places is None:
            return whole
        order = _joined(group, places, counts)
    size = int(order.max(initial=-1)) + 1
    there = np.zeros(size, bool)
    there[order] = True
    if not there.all():
        raise ValueError(f"indices leave out {int(np.argmin(there))}: no rank has a row for it")
    result = np.empty((size, *whole.shape[1:]), whole.dtype)
    result[order] = whole
    return result


def _numbers(rows: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the rows as an array, in the byte order of this machine."""
    own = np.atleast_1d(np.asarray(rows))
    if own.dtype.kind not in "biuf":
        raise ValueError(f"rows must be numbers, got {own.dtype}")
    return own.astype(own.dtype.newbyteorder("="), order="C", copy=False)


def _places(indices: npt.ArrayLike, rows: int) -> npt.NDArray[np.int64]:
    places = np.asarray(indices, np.int64).ravel()
    if len(places) != rows:
        raise ValueError(f"indices has {len(places)} numbers for {rows} rows")
    if (places < 0).any():
        raise ValueError(f"indices must not be negative, got {places.min()}")
    return places


def _joined(comm: Communicator, own: npt.NDArray[Any], counts: list[int]) -> npt.NDArray[Any]:
    """Return the rows of all ranks, one after another; as bytes, they may be of any dtype."""
    width = own.dtype.itemsize * int(np.prod(own.shape[1:], dtype=np.int64))
    sent = _placed(comm, own.reshape(-1).view(np.uint8))
    whole = _placed(comm, np.empty(sum(counts) * width, np.uint8))
    comm.all_gather(sent, whole, [count * width for count in counts])
    joined: npt.NDArray[Any] = _on_host(whole).view(own.dtype)
    return joined.reshape(sum(counts), *own.shape[1:])


def _placed(comm: Communicator, array: npt.NDArray[Any]) -> Buffer:
    """Return the array, or a copy on the device where the communicator's buffers live."""
    if comm.device == "cpu":
        return array
    import torch

    return torch.tensor(array, device=comm.device)


def _on_host(buffer: Buffer) -> Any:
    return buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy()
