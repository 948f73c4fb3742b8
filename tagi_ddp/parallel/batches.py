"""Batches of a dataset, from the numbers of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from tagi_ddp.data.empty_batch import empty_batch, parts_of, with_parts

# Arrays or tensors of one length, or a dataset.
Data = Sequence[Any] | Dataset[Any]


def check_data(name: str, data: Data, batch_size: int, ranks: int) -> int:
    """Return the number of samples of the argument called ``name``.

    Raise TypeError or ValueError unless it is data of which every batch has a sample for each of
    ``ranks``, the number of ranks that need one.
    """
    length = _length_of(name, data)
    if length == 0:
        raise ValueError(f"{name} must have samples, got none")
    last = min(length % batch_size or batch_size, length)
    if last < ranks:
        raise ValueError(
            f"batch_size {batch_size} leaves a batch of {last} of {length} samples of {name} for "
            f"{ranks} ranks, some of which would have none: choose another, or leave samples out"
        )
    return length


def _length_of(name: str, data: Data) -> int:
    takes = f"{name} must be arrays of one length, like (x, y), or a dataset that has a length, got"
    try:
        if not isinstance(data, tuple | list):
            return len(data)  # type: ignore[arg-type]
        lengths = [len(array) for array in data]
    except TypeError as error:
        raise TypeError(f"{takes} a {type(data).__name__}: {error}") from error
    kinds = {f"{type(array).__name__}s" for array in data if isinstance(array, tuple | list)}
    if kinds:
        raise TypeError(
            f"{takes} a {type(data).__name__} of {' and '.join(sorted(kinds))}: make arrays of "
            "what they hold, or, if each is a sample, a torch Dataset"
        )
    if len(set(lengths)) != 1:
        raise ValueError(f"{name} must hold arrays of one length, got lengths {lengths}")
    return lengths[0]


def take(data: Data, indices: NDArray[np.int64], model: torch.nn.Module) -> Any:
    """Return a batch of the samples' type; for a named tuple of arrays, a named tuple.

    For a module with parameters it holds tensors on the module's device. Real floats of a dtype
    that no parameter has are converted to the widest of the parameters' real dtypes; complex
    parameters count as their real parts. So if the module has one dtype, all floats get it. A batch
    without samples has the same structure as others.
    """
    device = next((each.device for each in model.parameters()), None)
    if isinstance(data, tuple | list):
        arrays = [array[indices] for array in data]
        parts = arrays if device is None else list(map(torch.as_tensor, arrays))
        batch: Any = with_parts(data, parts) if hasattr(data, "_fields") else tuple(parts)
    elif len(indices):
        batch = default_collate([data[int(i)] for i in indices])
    else:
        batch = empty_batch(default_collate, data[0])
    return batch if device is None else _moved(batch, device, _real_dtypes(model))


def _real_dtypes(model: torch.nn.Module) -> set[torch.dtype]:
    """Return the parameters' real dtypes with which torch computes: none of 8 bits."""
    dtypes = {each.dtype for each in model.parameters()}
    floats = {dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return {dtype for dtype in floats if dtype.itemsize > 1}


def _moved(batch: Any, device: torch.device, dtypes: set[torch.dtype]) -> Any:
    """Return a batch whose tensors are on a device and of the dtypes that `take` describes."""
    if isinstance(batch, Tensor):
        dtype = batch.dtype
        if batch.is_floating_point() and dtypes and dtype not in dtypes:
            dtype = reduce(torch.promote_types, dtypes)
        return batch.to(device, dtype, non_blocking=True)
    parts = parts_of(batch)
    if parts is None:
        return batch
    return with_parts(batch, [_moved(part, device, dtypes) for _, part in parts])
