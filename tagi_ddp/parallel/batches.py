"""From a dataset and the numbers of samples to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

# Arrays or tensors of one length, or a dataset.
Data = Sequence[Any] | Dataset[Any]


def length_of(data: Data) -> int:
    """Return the number of samples; raise TypeError or ValueError if there is no one number."""
    try:
        if not isinstance(data, tuple | list):
            return len(data)  # type: ignore[arg-type]
        lengths = [len(array) for array in data]
    except TypeError as error:
        raise TypeError(
            "data must be arrays of one length, like (x, y), or a dataset that has a length, got "
            f"a {type(data).__name__}: {error}"
        ) from error
    if len(set(lengths)) != 1:
        raise ValueError(f"data must hold arrays of one length, got lengths {lengths}")
    return lengths[0]


def check_shares(length: int, batch_size: int, size: int) -> None:
    """Raise ValueError if a rank has no sample of some batch: torch needs one on every rank."""
    last = length % batch_size or batch_size
    if length and min(last, batch_size) < size:
        raise ValueError(
            f"batch_size {batch_size} leaves a batch of {min(last, batch_size)} of {length} "
            f"samples for {size} ranks, some of which would have none: choose another, or leave "
            "samples out"
        )


def take(data: Data, indices: NDArray[np.int64], model: torch.nn.Module) -> Any:
    """Return a batch; of a module with parameters as tensors, on its device and of its dtype."""
    parameter = next(model.parameters(), None)
    if isinstance(data, tuple | list):
        batch: Any = tuple(array[indices] for array in data)
        if parameter is not None:
            batch = tuple(map(torch.as_tensor, batch))
    else:
        batch = default_collate([data[int(i)] for i in indices]) if len(indices) else ()
    return batch if parameter is None else _to(batch, parameter)


def _to(batch: Any, like: Tensor) -> Any:
    if isinstance(batch, Tensor):
        dtype = like.dtype if batch.is_floating_point() else batch.dtype
        return batch.to(like.device, dtype, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _to(value, like) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_to(value, like) for value in batch)
    return batch
