"""A batch of no samples, of the type and layout of other batches."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Parts = list[tuple[str, Any]]


def empty_batch(collate: Callable[[list[Any]], Any], sample: Any) -> Any:
    """Return the batch that ``collate`` would make of no samples.

    It compares the batches of one and of two samples. Arrays and tensors get the length 0 in each
    dimension that has doubled; sequences that have doubled become empty. Mappings, dataclasses and
    other sequences keep their types and hold empty parts.

    Raises:
        TypeError: naming a part whose value for no samples is not known, like a count, or an object
            of another type, which could hold data of ``sample``.
    """
    return _empty("batch", collate([sample]), collate([sample, sample]))


def parts_of(batch: Any) -> Parts | None:
    """Return the parts of a mapping, a dataclass or a sequence, each after its path.

    None for other types: arrays, tensors, numbers, text.
    """
    if isinstance(batch, type | str | bytes | bytearray | memoryview):
        return None
    if isinstance(batch, Mapping) and not hasattr(batch, "shape"):
        return [(f"[{key!r}]", part) for key, part in batch.items()]
    if dataclasses.is_dataclass(batch):
        fields = dataclasses.fields(batch)
        return [(f".{field.name}", getattr(batch, field.name)) for field in fields]
    if isinstance(batch, Sequence) and not hasattr(batch, "shape"):
        return [(f"[{index}]", part) for index, part in enumerate(batch)]
    return None


def with_parts(batch: Any, parts: list[Any]) -> Any:
    """Return a container like ``batch`` that holds other parts, in the order of `parts_of`.

    Raises TypeError if its type cannot be made of parts.
    """
    kind: Any = type(batch)
    if isinstance(batch, Mapping):
        items = dict(zip(batch, parts, strict=True))
        factory = [batch.default_factory] if isinstance(batch, defaultdict) else []
        made = kind(*factory, items)
        if list(made) != list(items):
            raise TypeError(f"a {kind.__name__} of other values has other keys")
        return made
    if dataclasses.is_dataclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
        if more := getattr(batch, "__dict__", {}).keys() - set(names):
            raise TypeError(f"its attribute {min(more)} is no field")
        made = copy.copy(batch)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)  # It may be frozen.
        return made
    if hasattr(kind, "_make"):  # It is a named tuple.
        return kind._make(parts)
    return kind(parts)


def _empty(path: str, one: Any, two: Any) -> Any:
    parts, twice = parts_of(one), parts_of(two)
    if parts is not None and twice is not None and _alike(parts, twice):
        pairs = zip(parts, twice, strict=True)
        empty = [_empty(path + name, part, other) for (name, part), (_, other) in pairs]
    else:
        empty = None
    try:
        if type(one) is not type(two):
            raise TypeError(f"for two samples it is a {type(two).__name__}")
        return _without_samples(one, two) if empty is None else with_parts(one, empty)
    except Exception as error:
        raise TypeError(f"{path} is a {type(one).__name__}: {error}") from error


def _alike(parts: Parts, others: Parts) -> bool:
    """Return whether the parts have the same names, and are more than a list of texts."""
    texts = bool(parts) and all(isinstance(part, str) for _, part in parts)
    return not texts and [name for name, _ in parts] == [name for name, _ in others]


def _without_samples(one: Any, two: Any) -> Any:
    """Return a sequence, an array or a tensor of no samples, from those of one and of two."""
    if one is None:
        return None
    if parts_of(one) is None and hasattr(one, "shape"):
        return _without_rows(one, tuple(one.shape), tuple(two.shape))
    if not isinstance(one, Sequence) or parts_of(one) is None:
        raise TypeError("its value for no samples is not known")
    if len(two) != 2 * len(one) and not all(isinstance(part, str) for part in one):
        raise TypeError(f"its length is {len(one)} for one sample and {len(two)} for two")
    return with_parts(one, [])


def _without_rows(array: Any, shape: tuple[int, ...], twice: tuple[int, ...]) -> Any:
    if shape == twice and 0 in shape:
        return array
    pairs = zip(shape, twice, strict=True)
    grown = [axis for axis, (length, other) in enumerate(pairs) if length != other]
    if not grown or any(twice[axis] != 2 * shape[axis] for axis in grown):
        raise TypeError(f"its shape is {shape} for one sample and {twice} for two")
    index = [slice(0 if axis in grown else None) for axis in range(grown[-1] + 1)]
    return array[tuple(index) if len(index) > 1 else index[0]]
