"""Nested dicts, lists and tuples of arrays and plain values, in memory and in a safetensors file.

Arrays are stored as such, all else as JSON in the header. Nothing is ever unpickled. A value that
is read has the type that was written; a value is refused if the file cannot hold its type.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tagi_ddp.checkpoint.array_file import ArrayFile, DamagedFile, Leaf, naming, write_arrays

__all__ = ["DamagedFile", "Snapshot", "check", "equal", "read_tree"]

_DTYPES = {  # as safetensors names them
    "bool": "BOOL",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
# Dtypes that all versions of safetensors know. Others of 8 or 16 bits are stored as integers.
_OF_TORCH = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", **_DTYPES}
_PLAIN = (type(None), bool, int, float, complex, str)
_ATTRIBUTED: tuple[type[dict[Any, Any]], ...] = (OrderedDict, Counter)  # dicts with attributes
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)}
_LONG = 1024  # bits; a longer int is written in hex, as Python limits decimal digits
_DEPTH = 100  # the limit for trees; one that holds itself has no end
_TAKES = (
    "give numbers, text, arrays and tensors, in dicts, lists and tuples, of these types and of no "
    "subclass; a Counter, an OrderedDict and a defaultdict of a builtin are dicts here"
)


class Snapshot:
    """A copy of a tree, in memory that the next copy uses again."""

    def __init__(self) -> None:
        self._header: Any = None
        self._leaves: dict[str, Leaf] = {}

    def take(self, tree: Any) -> None:
        """Copy a tree; raise TypeError that names the value if one cannot be saved."""
        found: dict[str, Leaf] = {}
        self._header = _encode(tree, "", found)
        kept, self._leaves = self._leaves, {}
        for name, leaf in found.items():
            copy = kept[name].data if name in kept else None
            if copy is None or copy.size != leaf.data.size:
                copy = np.empty_like(leaf.data)
            np.copyto(copy, leaf.data)
            self._leaves[name] = Leaf(leaf.dtype, leaf.shape, copy)

    def write(self, file: BinaryIO, save: str = "") -> None:
        """Write the copy as a safetensors file, with checksums and a label of the save."""
        write_arrays(file, self._leaves, json.dumps(self._header, allow_nan=False), save)


def check(tree: Any, name: str = "") -> None:
    """Raise TypeError that names the value if a tree cannot be saved; no array is copied."""
    _encode(tree, f"/{name}" if name else "", None)


def equal(a: Any, b: Any) -> bool:
    """Return whether two trees are the same in value and type, their arrays bit for bit."""
    leaves: tuple[dict[str, Leaf], dict[str, Leaf]] = {}, {}
    headers = (
        # 1, 1.0 and True differ as text.
        json.dumps(_encode(tree, "", found), sort_keys=True)
        for tree, found in zip((a, b), leaves, strict=True)
    )
    if len(set(headers)) > 1:
        return False
    pairs = ((leaf, leaves[1][name]) for name, leaf in leaves[0].items())
    return all(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and np.array_equal(one.data, other.data)
        for one, other in pairs
    )


def read_tree(path: Path, *keys: str) -> Any:
    """Return the content of a checkpoint's file, or its part under nested ``keys``.

    Arrays are copies; the checksums of the header and of the arrays that are read are verified.
    Raises DamagedFile, OSError.
    """
    with ArrayFile(Path(path)) as arrays, naming(path):
        header = json.loads(arrays.tree)
        for key in keys:
            header = _inner(header)[key]
        return _decode(header, arrays)


def _inner(header: Any) -> Any:
    """Return the plain dict of an encoded dict of another kind."""
    match header:
        case {"$OrderedDict": [inner, _]} | {"$Counter": [inner, _]} | {"$defaultdict": [inner, _]}:
            return inner
    return header


def _encode(value: Any, name: str, leaves: dict[str, Leaf] | None, depth: int = 0) -> Any:
    """Return ``value`` as JSON, and add its arrays to ``leaves``; None: leave them out."""
    if depth > _DEPTH:
        raise TypeError(f"{name[1:40]}... is nested more than {_DEPTH} deep, or holds itself")

    def inner(part: Any, own: Any = None) -> Any:
        return _encode(part, name if own is None else f"{name}/{own}", leaves, depth + 1)

    kind = type(value)
    if kind in _PLAIN:
        return _plain(value)
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(part, key) for key, part in value.items()}
        for key in value:
            if not _is_key(key):
                raise TypeError(
                    f"{name[1:]} has a key that is a {type(key).__name__}, which cannot be saved: "
                    f"keys are text, numbers of at most {_LONG} bits, and tuples of them"
                )
        return {"$items": [[inner(key, key), inner(part, key)] for key, part in value.items()]}
    if kind in _ATTRIBUTED:  # States of modules have an attribute, the modules' versions.
        return {f"${kind.__name__}": [inner(dict(value)), inner(vars(value), "__dict__")]}
    if kind is defaultdict:
        factory = value.default_factory
        builtin = None if factory is None else str(getattr(factory, "__name__", ""))
        if builtin is not None and _FACTORIES.get(builtin) is not factory:
            raise TypeError(
                f"{name[1:]} is a defaultdict of {factory!r}, which cannot be saved: give one of "
                f"{', '.join(_FACTORIES)} or None, or a dict"
            )
        return {"$defaultdict": [inner(dict(value)), builtin]}
    if kind in (list, tuple):
        parts = [inner(part, index) for index, part in enumerate(value)]
        return {"$tuple": parts} if kind is tuple else parts
    _check_leaf(value, name)
    if leaves is None:
        return None
    tag, leaf = _leaf(value)
    name = name.encode(errors="replace").decode()  # A file cannot hold a lone surrogate.
    while name in leaves:  # The key "a/b" may be beside a key "a" with "b" in it.
        name += "'"
    leaves[name] = leaf
    return {tag: name}


def _plain(value: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    if type(value) is int and value.bit_length() > _LONG:
        return {"$int": hex(value)}
    if type(value) is complex:
        return {"$complex": [_plain(value.real), _plain(value.imag)]}
    return value


def _is_key(key: Any) -> bool:
    return (
        (type(key) in _PLAIN and (type(key) is not int or key.bit_length() <= _LONG))
        or isinstance(key, np.generic)
        or (type(key) is tuple and all(map(_is_key, key)))
    )


def _check_leaf(value: Any, name: str) -> None:
    """Raise TypeError unless a value is an array or a tensor that a file can hold."""
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor:
        dtype = str(value.dtype).removeprefix("torch.")
        if (
            value.layout != torch.strided
            or value.is_nested
            or value.is_meta
            or dtype.startswith("q")  # A quantized tensor has its scale beside its numbers.
            or (dtype not in _OF_TORCH and not value.is_complex() and value.itemsize > 2)
        ):
            raise TypeError(
                f"{name[1:]} is a tensor of {value.dtype}, {value.layout}, which cannot be saved"
            )
    elif type(value) is np.ndarray or isinstance(value, np.generic):
        part = value.real if value.dtype.kind == "c" else value
        if part.dtype.name not in _DTYPES or not value.dtype.isnative:
            raise TypeError(f"{name[1:]} is an array of {value.dtype}: give one of numbers")
    else:
        raise TypeError(f"{name[1:]} is a {type(value).__name__}, which cannot be saved: {_TAKES}")


def _leaf(value: Any) -> tuple[str, Leaf]:
    if not isinstance(value, np.ndarray | np.generic):
        return _tensor_leaf(value)
    is_complex = value.dtype.kind == "c"
    array = np.stack([value.real, value.imag], -1) if is_complex else np.asarray(value)
    flat = np.ascontiguousarray(array).reshape(-1)
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    tag = f"$complex {kind}" if is_complex else f"${kind}"
    return tag, Leaf(_DTYPES[array.dtype.name], array.shape, flat.view(np.uint8))


def _tensor_leaf(value: Any) -> tuple[str, Leaf]:
    import torch

    dtype = str(value.dtype).removeprefix("torch.")
    tag, parts = "$tensor", value.detach()
    if value.is_complex():
        tag, parts = "$complex tensor", torch.view_as_real(parts.resolve_conj())
    elif dtype not in _OF_TORCH:
        tag = f"${dtype} tensor"
        parts = parts.view(torch.uint8 if value.itemsize == 1 else torch.uint16)
    flat = parts.cpu().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # A single element is contiguous with any stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    kind = _OF_TORCH[str(parts.dtype).removeprefix("torch.")]
    return tag, Leaf(kind, tuple(parts.shape), flat.view(torch.uint8).numpy())


def _decode(value: Any, arrays: ArrayFile) -> Any:
    if isinstance(value, list):
        return [_decode(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", text)]:
            return float(text)
        case [("$int", text)]:
            return int(text, 16)
        case [("$complex", parts)]:
            return complex(*_decode(parts, arrays))
        case [("$tuple", parts)]:
            return tuple(_decode(part, arrays) for part in parts)
        case [("$items", items)]:
            return {_decode(key, arrays): _decode(v, arrays) for key, v in items}
        case [("$OrderedDict" | "$Counter" as kind, [items, attributes])]:
            made: Any = (OrderedDict if kind == "$OrderedDict" else Counter)(_decode(items, arrays))
            vars(made).update(_decode(attributes, arrays))
            return made
        case [("$defaultdict", [items, factory])]:
            return defaultdict(
                None if factory is None else _FACTORIES[factory], _decode(items, arrays)
            )
        case [("$array", name)]:
            return arrays.array(name)
        case [("$scalar", name)]:
            return arrays.array(name)[()]
        case [("$complex array" | "$complex scalar" as kind, name)]:
            pairs = arrays.array(name)
            array = pairs.view(np.result_type(pairs.dtype, np.complex64))[..., 0]
            return array if kind == "$complex array" else array[()]
        case [("$tensor", name)]:
            return arrays.tensor(name)
        case [("$complex tensor", name)]:
            import torch

            return torch.view_as_complex(arrays.tensor(name))
        case [(kind, name)] if kind.startswith("$") and kind.endswith(" tensor"):
            import torch

            dtype = getattr(torch, kind[1 : -len(" tensor")], None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"it holds a {kind[1:]}, which this version of torch has not")
            return arrays.tensor(name).view(dtype)
        case [(kind, _)] if kind.startswith("$"):
            raise ValueError(f"it holds {kind!r}, which this version does not know")
    return {key: _decode(part, arrays) for key, part in value.items()}
