"""The engine's file of a network's parameters, in the same format: either side reads the other's.

A record for each layer, in order: the length of its description, 8 bytes; that text; then means and
variances of weights, of biases, and running ones, as float32. Activations have no record.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.engine.layers import PARAMETERS, walk
from tagi_ddp.engine.whole_file import whole_file

_LENGTH = struct.Struct("<Q")
# Layers without parameters that have a record, too.
_POOLING = ("AvgPool2d", "MaxPool2d")
# The engine adds means and variances of its last batch to these, and cannot read them back.
_WITH_BATCH = "LayerNorm"

State = Sequence[tuple[str, NDArray[Any]]]


class ParameterFileError(AllRanksRaise, ValueError):
    """A file does not hold the parameters of this network; nothing has been loaded."""


@dataclass(frozen=True)
class _Record:
    """A layer in a file: its path in the network, the engine's description, its arrays."""

    name: str
    kind: str
    head: bytes
    arrays: list[NDArray[Any]]


def write_parameters(filename: str, model: Any, state: State) -> None:
    """Write the ``state`` of a replica of ``model`` to a file, which is replaced as a whole."""
    with whole_file(filename) as file:
        for record in _records(model, state):
            file.write(record.head)
            for array in record.arrays:
                file.write(np.ascontiguousarray(array).data)


def read_parameters(filename: str, model: Any, state: State) -> None:
    """Read a file into the arrays of ``state``, once all of the file has been checked.

    Raises ParameterFileError, naming the file and the layer, if it was made by another network, is
    cut or too long, or holds a number that is no mean or no variance.
    """
    with open(filename, "rb") as file:
        data = file.read()
    records = _records(model, state)
    heads = [record.head for record in records[1:]]
    position = 0
    found: list[tuple[NDArray[Any], NDArray[np.float32]]] = []
    for record, next_head in zip(records, [*heads, None], strict=True):
        position = _pass_head(filename, data, position, record)
        for index, array in enumerate(record.arrays):
            if position + array.nbytes > len(data):
                raise _error(filename, record, f"the file ends within it, at {len(data)} bytes")
            values = np.frombuffer(data, np.float32, array.size, position)
            wrong = _first_wrong(values, variances=index % 2 == 1)
            if wrong is not None:
                what = "variance" if index % 2 else "mean"
                raise _error(filename, record, f"its {what} {wrong} is {values[wrong]}")
            found.append((array, values))
            position += array.nbytes
        if record.kind == _WITH_BATCH:
            position = _pass_batch(filename, data, position, record, next_head)
    if position != len(data):
        raise ParameterFileError(
            f"{filename!r} has {len(data) - position} bytes after the last layer of this network: "
            "it was saved by another one"
        )
    for array, values in found:
        array[...] = values
    for arrays in statistics_of(state).values():
        mean, variance, first = arrays
        # The file lacks the flag that no batch has replaced the initial statistics.
        first[...] = not mean.any() and bool((variance == 1).all())


class StateDict(dict[str, Any]):
    """The parameters by layer, as pytagi has them, with running statistics beside them.

    statistics: by the layer's path, means, variances, and the flag that the next batch replaces
    them.
    """

    statistics: dict[str, list[NDArray[Any]]]


def statistics_of(state: State) -> dict[str, list[NDArray[Any]]]:
    """Return the running statistics and their flags among the arrays of ``state``, by layer."""
    layers = groupby(state, key=lambda entry: entry[0])
    arrays = {name: [array for _, array in group] for name, group in layers}
    count = len(PARAMETERS)
    return {name: each[count:] for name, each in arrays.items() if len(each) > count}


def load_statistics(state_dict: Any, state: State) -> list[str]:
    """Copy running statistics of ``state_dict`` to ``state``; return the layers without any."""
    saved = getattr(state_dict, "statistics", {})
    missing = []
    for name, arrays in statistics_of(state).items():
        if name not in saved:
            missing.append(name)
        for array, values in zip(arrays, saved.get(name, ()), strict=False):
            array[...] = values
    return missing


def check_state_dict(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise an error that names the layer unless a state fits a network of the state ``own``."""
    if not isinstance(state, Mapping):
        got = type(state).__name__
        raise TypeError(f"state_dict must be what state_dict() returns, got a {got}")
    if state.keys() != own.keys():
        raise ValueError(
            f"state_dict has layers {sorted(state)}, this network {sorted(own)}: give the state of "
            "a network with the same layers"
        )
    for layer, arrays in own.items():
        if len(state[layer]) != len(PARAMETERS):
            raise ValueError(f"state_dict: {layer} must hold {', '.join(PARAMETERS)}")
        for name, mine, values in zip(PARAMETERS, arrays, state[layer], strict=True):
            if len(values) != len(mine):
                raise ValueError(
                    f"state_dict: {name} of {layer} has {len(values)} elements, not {len(mine)}"
                )
            wrong = _first_wrong(np.asarray(values, np.float32), name.startswith("var"))
            if wrong is not None:
                raise ValueError(f"state_dict: {name} of {layer} has {values[wrong]} at {wrong}")


def _records(model: Any, state: State) -> list[_Record]:
    """Return the file's records."""
    arrays = {
        # The engine does not save the flag that the running statistics have begun.
        name: [array for _, array in group if array.dtype == np.float32]
        for name, group in groupby(state, key=lambda entry: entry[0])
    }
    records = []
    for layer in walk(model):
        if layer.name in arrays or layer.kind in _POOLING:
            text = layer.handle.get_layer_info().encode()
            head = _LENGTH.pack(len(text)) + text
            records.append(_Record(layer.name, layer.kind, head, arrays.get(layer.name, [])))
    return records


def _pass_head(filename: str, data: bytes, position: int, record: _Record) -> int:
    end = position + len(record.head)
    if data[position:end] == record.head:
        return end
    if len(data) < end and record.head.startswith(data[position:]):
        raise _error(filename, record, f"the file ends before it, at {len(data)} bytes")
    begin = position + _LENGTH.size
    (length,) = _LENGTH.unpack(data[position:begin].ljust(_LENGTH.size, b"\0"))
    text = data[begin : begin + min(length, 80)]
    other = repr(text.decode()) if text.isascii() and length < 80 else "no layer's description"
    raise _error(filename, record, f"the file has {other} in its place")


def _pass_batch(
    filename: str, data: bytes, position: int, record: _Record, next_head: bytes | None
) -> int:
    end = len(data) if next_head is None else data.find(next_head, position)
    if end < 0 or (end - position) % 8:
        raise _error(filename, record, "what follows it is no layer of this network")
    return end


def _first_wrong(values: NDArray[np.float32], variances: bool) -> int | None:
    """Return the index of the first value that is no mean, or no variance; None if all are."""
    wrong = ~np.isfinite(values)
    if variances:
        wrong |= values < 0
    return int(wrong.argmax()) if wrong.any() else None


def _error(filename: str, record: _Record, what: str) -> ParameterFileError:
    return ParameterFileError(
        f"{os.fspath(filename)!r}, layer {record.name}: {what}. Give the file of a network "
        "with the same layers; save it again if it is damaged"
    )
