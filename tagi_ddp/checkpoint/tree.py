"""Nested dicts, lists and tuples of arrays and plain values, in memory and in a safetensors file.

Arrays lie in the file as such, all else as JSON in its header. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_DTYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_TREE = "tree"


class DamagedFile(ValueError):
    """A file is no checkpoint, or not all of one."""


@dataclass(frozen=True)
class Leaf:
    """An array or tensor: its dtype as safetensors names it, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class Snapshot:
    """A copy of a tree, in memory that is used again for the next one."""

    def __init__(self) -> None:
        self._header: Any = None
        self._leaves: dict[str, Leaf] = {}

    def take(self, tree: Any) -> None:
        """Copy a tree; TypeError, naming what it is, where something cannot be saved."""
        found: dict[str, Leaf] = {}
        self._header = _encode(tree, "", found)
        kept, self._leaves = self._leaves, {}
        for name, leaf in found.items():
            copy = kept[name].data if name in kept else None
            if copy is None or copy.size != leaf.data.size:
                copy = np.empty_like(leaf.data)
            np.copyto(copy, leaf.data)
            self._leaves[name] = Leaf(leaf.dtype, leaf.shape, copy)

    def write(self, file: BinaryIO) -> None:
        """Write the copy as a safetensors file.

        The format's own library keeps all of Python from running until it has written.
        """
        entries: dict[str, Any] = {
            "__metadata__": {_TREE: json.dumps(self._header, allow_nan=False)}
        }
        leaves = sorted(self._leaves.items(), key=lambda item: item[1].data.size % 8)
        begin = 0
        for name, leaf in leaves:
            end = begin + leaf.data.size
            entries[name] = {
                "dtype": leaf.dtype,
                "shape": leaf.shape,
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)
        for _, leaf in leaves:
            file.write(leaf.data.data)


def equal(a: Any, b: Any) -> bool:
    """Tell whether two trees are the same, their arrays bit for bit."""
    leaves: tuple[dict[str, Leaf], dict[str, Leaf]] = {}, {}
    if _encode(a, "", leaves[0]) != _encode(b, "", leaves[1]):
        return False
    pairs = ((leaf, leaves[1][name]) for name, leaf in leaves[0].items())
    return all(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and np.array_equal(one.data, other.data)
        for one, other in pairs
    )


def read_tree(path: Path, *keys: str) -> Any:
    """Return what a file holds, or what lies there under ``keys``, one in the other.

    Arrays are copies. Raises DamagedFile, OSError.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as arrays:
            header = json.loads((arrays.metadata() or {})[_TREE])
            for key in keys:
                header = header[key]
            return _decode(header, arrays, path)
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise DamagedFile(f"{path} is no checkpoint, or not all of one: {error}") from error


def _encode(value: Any, name: str, leaves: dict[str, Leaf]) -> Any:
    """Return ``value`` as JSON has it, and put its arrays into ``leaves``."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(part, f"{name}/{key}", leaves) for key, part in value.items()}
        items = [
            [_encode(key, name, leaves), _encode(part, f"{name}/{key}", leaves)]
            for key, part in value.items()
        ]
        return {"$items": items}
    if isinstance(value, (list, tuple)):
        parts = [_encode(part, f"{name}/{index}", leaves) for index, part in enumerate(value)]
        return {"$tuple": parts} if isinstance(value, tuple) else parts
    kind, leaf = _leaf(value, name)
    while name in leaves:  # "a/b" next to "a" with "b" in it
        name += "'"
    leaves[name] = leaf
    return {kind: name}


def _leaf(value: Any, name: str) -> tuple[str, Leaf]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in _DTYPES and value.layout == torch.strided:
            flat = value.detach().cpu().contiguous().reshape(-1)
            return "$tensor", Leaf(
                _DTYPES[dtype], tuple(value.shape), flat.view(torch.uint8).numpy()
            )
        raise TypeError(f"{name[1:]} is a tensor of {value.dtype}, {value.layout}: it has no file")
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.name in _DTYPES and value.dtype.isnative:
            flat = np.ascontiguousarray(value).reshape(-1)
            kind = "$array" if isinstance(value, np.ndarray) else "$scalar"
            return kind, Leaf(_DTYPES[value.dtype.name], value.shape, flat.view(np.uint8))
        raise TypeError(f"{name[1:]} is an array of {value.dtype}: give one of numbers")
    raise TypeError(
        f"{name[1:]} is a {type(value).__name__}, which cannot be saved: give numbers, text, "
        "arrays and tensors, in dicts, lists and tuples"
    )


def _decode(value: Any, arrays: Any, path: Path) -> Any:
    if isinstance(value, list):
        return [_decode(part, arrays, path) for part in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", text)]:
            return float(text)
        case [("$tuple", parts)]:
            return tuple(_decode(part, arrays, path) for part in parts)
        case [("$items", items)]:
            return {_decode(key, arrays, path): _decode(v, arrays, path) for key, v in items}
        case [("$array", name)]:
            return arrays.get_tensor(name)
        case [("$scalar", name)]:
            return arrays.get_tensor(name)[()]
        case [("$tensor", name)]:
            from safetensors import safe_open

            with safe_open(path, framework="pt") as tensors:
                return tensors.get_tensor(name)
    return {key: _decode(part, arrays, path) for key, part in value.items()}
