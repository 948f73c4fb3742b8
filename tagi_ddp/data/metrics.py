"""Results of all ranks together: exact means, rows in the data set's order, log-densities."""

from __future__ import annotations

import sys
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Buffer, Communicator, all_gather_object
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.communicators.init import adopted


def reduce_metrics(
    comm: Communicator | Any, total: npt.ArrayLike, count: int
) -> float | npt.NDArray[np.float64]:
    """Return the exact mean over all ranks' samples: the sum of totals over the sum of counts.

    A mean of the ranks' means would be wrong if they have different numbers of samples.

    Args:
        comm: of the ranks, which all call this; or a group that `as_communicator` takes, whose
            ranks each call connects anew.
        total: this rank's sum over its samples, one real number or an array or tensor of several
            metrics (the same shape on all ranks); zeros on a rank without samples. Added up in
            float64.
        count: the number of samples of this rank.

    Returns:
        the means as a float, or a float64 array of ``total``'s shape; the same bits on all ranks.

    Raises:
        ValueError: on all ranks: no rank has a sample, shapes differ, or an argument is wrong on a
            rank, whose own error may be a TypeError.
    """
    with adopted(comm) as group:
        remedy = "Give a total of the same shape and a count on all ranks."
        with all_or_none(group, "arguments of reduce_metrics", remedy) as same:
            totals = _real_numbers("total", total)
            samples = integer("count", count, 0)
            same("the shape of total", totals.shape)
        sums = _on_device(group, np.append(totals, samples))
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
        comm: of the ranks, which all call this; or a group that `as_communicator` takes, whose
            ranks each call connects anew.
        rows: this rank's, [its rows, ...], numbers or bools. Ranks have one dtype and one shape of
            a row; the number of rows may differ, and be 0. Tensors of dtypes that numpy has, on
            any device, are taken without their gradients.
        indices: the index of each row in the result, one int for each row; None: the rows are in
            rank order. If ranks have the same index, as samplers pad, the last one counts.

    Returns:
        [all rows, ...], or [1 + the greatest index, ...], of the dtype of ``rows``.

    Raises:
        ValueError: on all ranks: dtypes or shapes differ, there are more or fewer indices than
            rows, no rank has a row for an index, or an argument is wrong on a rank, whose own error
            may be a TypeError.
    """
    with adopted(comm) as group:
        remedy = "Give rows of one dtype and shape, and indices on all ranks or on none."
        with all_or_none(group, "arguments of gather", remedy) as same:
            own = _numbers(rows)
            targets = None if indices is None else _indices(indices, len(own))
            same("the dtype of rows", own.dtype)
            same("the shape of a row", own.shape[1:])
            same("indices", "none" if targets is None else "one for each row")
        counts = all_gather_object(group, len(own))
        whole = _joined(group, own, counts)
        if targets is None:
            return whole
        order = _joined(group, targets, counts)
    size = int(order.max(initial=-1)) + 1
    present = np.zeros(size, bool)
    present[order] = True
    if not present.all():
        raise ValueError(f"indices leave out {int(np.argmin(present))}: no rank has a row for it")
    result = np.empty((size, *whole.shape[1:]), whole.dtype)
    result[order] = whole
    return result


def gaussian_log_density(
    values: npt.NDArray[Any], mean: npt.NDArray[Any], variance: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the logarithm of the normal density of each value, of this mean and variance."""
    squares = np.square(values - mean) / variance
    return np.asarray(-0.5 * (squares + np.log(2 * np.pi * variance)))


def _real_numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    """Return an argument as float64."""
    array = _array(name, values, widen=True)
    is_real = array.dtype.kind in "biuf" or (
        array.dtype.kind == "O" and all(isinstance(each, Real | Decimal) for each in array.flat)
    )
    if not is_real:
        remedy = f": give {name}.real and {name}.imag apart" if array.dtype.kind == "c" else ""
        raise ValueError(f"{name} must be real numbers, got {array.dtype}{remedy}")
    return array.astype(np.float64)


def _numbers(rows: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the rows as an array, in the byte order of this machine."""
    own = np.atleast_1d(_array("rows", rows))
    if own.dtype.kind not in "biufc":
        raise ValueError(f"rows must be numbers, got {own.dtype}")
    return own.astype(own.dtype.newbyteorder("="), order="C", copy=False)


def _indices(indices: npt.ArrayLike, rows: int) -> npt.NDArray[np.int64]:
    array = _array("indices", indices)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"indices must be integers, got {array.dtype}")
    numbers = array.astype(np.int64).ravel()
    if len(numbers) != rows:
        raise ValueError(f"indices has {len(numbers)} numbers for {rows} rows")
    if (numbers < 0).any():
        raise ValueError(f"indices must not be negative, got {numbers.min()}")
    return numbers


def _array(name: str, values: Any, widen: bool = False) -> npt.NDArray[Any]:
    """Return an argument as an array; with ``widen`` tensors of floats as float64."""
    values = _for_numpy(name, values, widen)
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of numbers: {error}") from error


def _for_numpy(name: str, value: Any, widen: bool) -> Any:
    """Return a value for numpy, which would drop masks, and refuse tensors without a name."""
    if isinstance(value, list | tuple):
        return [_for_numpy(name, each, widen) for each in value]
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise ValueError(
                f"{name} has masked numbers, and masks are not exchanged: give "
                f"{name}.filled(...), and the mask apart if it is needed"
            )
        return value.data
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        raise ValueError(
            f"{name} is a tensor of {value.layout} on {value.device}: give a dense one with values"
        )
    held = value.detach().cpu().resolve_conj().resolve_neg()
    if widen and held.is_floating_point():
        held = held.double()
    try:
        return held.numpy()
    except (TypeError, RuntimeError) as error:
        other = "cfloat" if held.is_complex() else "float"
        raise ValueError(
            f"{name} is a tensor of {held.dtype}, which numpy does not have: give {name}.{other}()"
        ) from error


def _joined(comm: Communicator, own: npt.NDArray[Any], counts: list[int]) -> npt.NDArray[Any]:
    """Return the rows of all ranks, one after another; sent as bytes, for any dtype."""
    width = own.dtype.itemsize * int(np.prod(own.shape[1:], dtype=np.int64))
    sent = _on_device(comm, own.reshape(-1).view(np.uint8))
    whole = _on_device(comm, np.empty(sum(counts) * width, np.uint8))
    comm.all_gather(sent, whole, [count * width for count in counts])
    joined: npt.NDArray[Any] = _on_host(whole).view(own.dtype)
    return joined.reshape(sum(counts), *own.shape[1:])


def _on_device(comm: Communicator, array: npt.NDArray[Any]) -> Buffer:
    """Return the array, or a copy on the device of the communicator's buffers."""
    if comm.device == "cpu":
        return array
    import torch

    return torch.tensor(array, device=comm.device)


def _on_host(buffer: Buffer) -> Any:
    return buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy()
