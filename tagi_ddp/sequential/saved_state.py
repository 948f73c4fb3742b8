"""Checks that the saved state of a network fits, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_LATER = {"means"}  # entries that earlier versions did not save, and that may be missing
_PLAIN = (type(None), bool, int, float, str)


def require_alike(name: str, own: Any, saved: Any) -> None:
    """Raise ValueError, naming the entry, unless ``saved`` has the entries that ``own`` has.

    Arrays have the same size and dtype, lists the same length. None stands for anything, and
    ``saved`` may have more entries.
    """
    if own is None:
        return
    if isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            raise _differs(name, own, saved)
        for key, value in own.items():
            if key in saved:
                require_alike(f"{name}/{key}", value, saved[key])
            elif key not in _LATER:
                raise ValueError(f"{name}/{key} is not in what was saved")
    elif isinstance(own, np.ndarray):
        if not isinstance(saved, np.ndarray) or (own.dtype, own.size) != (saved.dtype, saved.size):
            raise _differs(name, own, saved)
    elif isinstance(own, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or len(own) != len(saved):
            raise _differs(name, own, saved)
        for index, (one, other) in enumerate(zip(own, saved, strict=True)):
            require_alike(f"{name}/{index}", one, other)
    elif not isinstance(saved, _PLAIN):
        raise _differs(name, own, saved)


def check_memory(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless LSTM states are of the same layers, and each of whole samples."""
    samples = saved["samples"]
    if type(samples) is not int or samples < 0:
        raise ValueError(f"memory/samples is {samples!r} in what was saved")
    if own["lstm"].keys() != saved["lstm"].keys():
        raise ValueError(
            f"there are LSTM states of layers {sorted(saved['lstm'])} in what was saved"
        )
    for index, parts in own["lstm"].items():
        theirs = saved["lstm"][index]
        width = len(parts[0]) // own["samples"] if own["samples"] else None
        sizes = {part.size for part in theirs if part.dtype == np.float32}
        whole = len(theirs) == len(parts) and len(sizes) == 1
        size = sizes.pop() if whole else 0
        if (
            not whole
            or (samples and size % samples)
            or (width and size not in (0, samples * width))
        ):
            raise ValueError(f"the LSTM states of layer {index} do not fit in what was saved")


def check_merge(state: Mapping[str, Any], size: int) -> None:
    """Raise ValueError unless `merge_saved` can merge a state, with arrays of ``size`` numbers."""
    numbers = np.zeros(size, np.float32)
    level = {"gaussians": numbers, "steps": 0, "damping": None}
    known = {"node_number": 0, "counters": {"_samples": 0}, "node": level, "nodes": None}
    require_alike("exchange", known, state)
    if state["nodes"] is not None:
        nodes = {"common": level, "sent": numbers, "sender": None, "sum": None}
        require_alike("exchange/nodes", nodes, state["nodes"])


def _differs(name: str, own: Any, saved: Any) -> ValueError:
    return ValueError(f"{name} is {_kind(saved)} in what was saved, and {_kind(own)} here")


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.size} numbers of {value.dtype}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"
