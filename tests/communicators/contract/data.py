"""Buffers with known contents, and what their reduction must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = FLOATS + INTEGERS
COUNTS = (0, 1, 7, 1000, 70_001)

# The largest relative error of a sum of a few numbers, rounded once to the dtype.
PRECISION = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-15}


def make(dtype: str, count: int, seed: int) -> Any:
    """Return ``count`` random elements; a torch tensor for bfloat16, which numpy does not have."""
    random = np.random.default_rng((seed, count))
    if dtype in FLOATS:
        values = random.uniform(0.5, 2.0, count) * random.choice([-1.0, 1.0], count)
        if dtype == "bfloat16":
            return tensor(values, dtype)
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min // 8, limits.max // 8, count, dtype=dtype, endpoint=True)


def tensor(values: Any, dtype: str) -> Any:
    """Return a torch tensor."""
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype))


def tensor_of(array: np.ndarray) -> Any:
    """Return a torch tensor that shares the memory of ``array``."""
    import torch

    return torch.from_numpy(array)


def empty(dtype: str, count: int) -> Any:
    """Return ``count`` elements that no operation would leave."""
    if dtype == "bfloat16":
        return tensor([113.0] * count, dtype)
    return np.full(count, 113, dtype)


def values(buffer: Any) -> np.ndarray:
    """Return the elements as float64, integers as they are."""
    if not isinstance(buffer, np.ndarray):
        buffer = buffer.double().numpy()
    return buffer.astype(np.float64) if buffer.dtype.kind == "f" else buffer.copy()


def bits(buffer: Any) -> bytes:
    """Return the buffer's memory."""
    if isinstance(buffer, np.ndarray):
        return buffer.tobytes()
    import torch

    return buffer.contiguous().view(torch.int16).numpy().tobytes()


def ops(dtype: str) -> tuple[str, ...]:
    """Return the reductions of ``dtype``."""
    return ("sum", "min", "max") + (("mean",) if dtype in FLOATS else ())


def check_reduced(result: Any, inputs: Sequence[Any], op: str, dtype: str) -> None:
    """Check ``result`` against ``inputs`` of all ranks: exact but for one rounding of a float."""
    rows = np.stack([values(buffer) for buffer in inputs])
    if op in ("min", "max"):
        expected = getattr(rows, op)(axis=0)
    else:
        expected = rows.sum(axis=0, dtype=rows.dtype)
        if op == "mean":
            expected = expected / len(rows)
    got = values(result)
    if dtype in INTEGERS or op in ("min", "max"):
        assert np.array_equal(got, expected), (op, dtype, got, expected)
    else:
        error = np.abs(got - expected)
        scale = np.abs(rows).sum(axis=0) / (len(rows) if op == "mean" else 1)
        assert (error <= PRECISION[dtype] * scale).all(), (op, dtype, got, expected)


def check_equal(result: Any, expected: Any) -> None:
    """Check that both hold the same bits."""
    assert bits(result) == bits(expected), (result, expected)


def concatenate(parts: Sequence[Any]) -> Any:
    """Return the buffers one after the other."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))


def caught(call: Callable[[], Any]) -> Exception:
    """Return the exception that ``call`` raises."""
    try:
        result = call()
    except Exception as error:
        return error
    raise AssertionError(f"no error, but {result!r}")


def announce(folder: Path, rank: int) -> None:
    """Announce this rank in the folder, for `await_ranks` of other ranks."""
    (folder / str(rank)).touch()


def await_ranks(folder: Path, ranks: Iterable[int]) -> None:
    """Return once all these ranks have announced themselves in the folder, which was empty."""
    files = [folder / str(rank) for rank in ranks]
    deadline = time.monotonic() + 20
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, files
        time.sleep(0.01)
