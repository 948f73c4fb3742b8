"""Results of `map_networks` as texts: JSON, in which an object names a type and has its value."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_EXACT = "biufcUSO"  # kinds of numpy's types whose elements Python has, too
_JSON_INT = 64  # bits of an integer in decimals; Python reads no decimals of thousands of digits


def to_text(value: Any) -> str:
    """Return a text from which `from_text` makes an equal value; TypeError if it cannot.

    Values are None, bools, numbers, texts and bytes, and lists, tuples and dicts of these. Arrays
    become lists, and numpy's scalars and other subclasses the Python type that they are made of.
    """
    return json.dumps(_tagged(value))


def from_text(text: str) -> Any:
    """Return the value of a text of `to_text`."""
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _EXACT or value.dtype.char in "gG":  # long doubles
            raise _refusal(f"an array of {value.dtype}" if value.ndim else f"a {value.dtype}")
        plain = value.tolist()
        return plain if value.dtype.kind in "biuf" else _tagged(plain)
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _JSON_INT else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [_tagged(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(part)] for key, part in value.items()]}
    raise _refusal(f"a {type(value).__name__}")


def _untagged(tagged: dict[str, Any]) -> Any:
    ((kind, value),) = tagged.items()
    if kind == "int":
        return int(value, 16)
    if kind == "complex":
        return complex(*value)
    if kind == "bytes":
        return bytes.fromhex(value)
    return tuple(value) if kind == "tuple" else dict(value)


def _refusal(what: str) -> TypeError:
    return TypeError(
        f"train returned {what}; return numbers, texts, lists, dicts or arrays of these, dates as "
        "texts"
    )
