"""From a dataset and the numbers of samples to a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

# Arrays or tensors of one length, or a dataset.
Data = Sequence[Any] | Dataset[Any]


def check_data(name: str, data: Data, batch_size: int, ranks: int) -> int:
    """Return the number of samples of the argument called ``name``.

    Raises TypeError or ValueError unless it is data, and each of ``ranks``, those that need one,
    has a sample of every batch.
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
    """Return a batch; of a module with parameters as tensors, on its device and of its dtype.

    One without samples looks like the others.
    """
    parameter = next(model.parameters(), None)
    if isinstance(data, tuple | list):
        batch: Any = tuple(array[indices] for array in data)
        if parameter is not None:
            batch = tuple(map(torch.as_tensor, batch))
    elif len(indices):
        batch = default_collate([data[int(i)] for i in indices])
    else:
        batch = _each(default_collate([data[0]]), lambda tensor: tensor[:0])
    return batch if parameter is None else _each(batch, lambda tensor: _to(tensor, parameter))


def _to(tensor: Tensor, like: Tensor) -> Tensor:
    dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(like.device, dtype, non_blocking=True)


def _each(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with all its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: _each(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_each(value, change) for value in batch)
    return batch
