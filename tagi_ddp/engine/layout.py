"""The layout of the memory of the engine's layers, found at run time.

Engines that people build lay out their layers' memory in other ways than the wheel does, under the
same version number. So offsets are searched on test layers: values that the public interface has
written are looked for in the bytes of the layer. Those bytes are read by way of the kernel, which
returns an error for memory that is not there.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp._backend import batch_norm_statistics, engine_vectors
from tagi_ddp.engine.layers import DELTAS, PARAMETERS
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.engine.pointers import LayoutError, address_of, layout_errors

_VECTORS = PARAMETERS + DELTAS  # the order in which they lie behind each other
_STRING = 32  # bytes of a std::string: begin, length, up to 15 characters in place
_SEARCHED = 4096  # bytes of a layer in which a search looks
_COMPARED = 1024  # vectors of at most so many elements are compared; others are slow to copy


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes from the address of a layer.

    vectors: of its eight vectors, from mu_w on. counter: of the number of corrected variances.
    end: of the fields that a derived class adds.
    """

    vectors: int
    counter: int
    end: int


@functools.cache
@layout_errors()
def find_layout() -> Layout:
    """Return the layout of the engine's layers; raise LayoutError if the search does not find it.

    It is verified by writes in both directions, once in a process.
    """
    load_engine()
    import cutagi

    linear = cutagi.Linear(0, 0, True)  # With weights it would draw from the engine's generator.
    written = {
        name: (np.arange(count, dtype=np.float32) + 0.5) * count
        for count, name in enumerate(_VECTORS, start=3)
    }
    for name, values in written.items():
        setattr(linear, name, values.tolist())
    address = address_of(linear)
    vectors = _only("the vectors of a layer", _offsets_of(address, list(written.values())))
    memory = engine_vectors(address + vectors)
    for name, values in written.items():
        memory.view(name)[:] = -values
        if not np.array_equal(np.asarray(getattr(linear, name), np.float32), -values):
            raise LayoutError(f"a write to {name} in memory does not show publicly")
    end = _end_of_base(address)
    return Layout(vectors, _counter_offset(cutagi, end), end)


def read_memory(address: int, size: int) -> bytes:
    """Return up to ``size`` bytes from ``address`` on, as many as there are."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, size, address)
    finally:
        os.close(memory)


def words_of(address: int) -> list[int]:
    """Return a layer's memory in words of 64 bits, as far as a search looks."""
    data = read_memory(address, _SEARCHED)
    return list(struct.unpack(f"{len(data) // 8}Q", data[: len(data) // 8 * 8]))


def vector_sizes(words: list[int], index: int, count: int) -> list[int] | None:
    """Return the numbers of floats of ``count`` vectors from word ``index`` on; None: no vectors.

    A vector's begin, end and end of memory are in order. Nothing that they point to is read.
    """
    sizes = []
    for at in range(index, index + 3 * count, 3):
        begin, end, capacity = words[at : at + 3] if at + 3 <= len(words) else (1, 0, 0)
        if not begin <= end <= capacity or (begin == 0) != (capacity == 0) or (end - begin) % 4:
            return None
        sizes.append((end - begin) // 4)
    return sizes


def check_layer(layer: Any, address: int, layout: Layout) -> None:
    """Raise LayoutError unless the vectors at ``address`` agree with the public ``layer``.

    Compares the sizes, and the contents of short vectors. No element is read of a vector whose size
    is not the public one.
    """
    with layout_errors():
        memory = engine_vectors(address + layout.vectors)
        for name in _VECTORS:
            size = memory.size(name)
            differs = size != _num_weights(layer, name) and size != len(getattr(layer, name))
            if not differs and size <= _COMPARED:
                public = np.asarray(getattr(layer, name), np.float32)
                differs = not np.array_equal(memory.view(name), public, equal_nan=True)
            if differs:
                raise LayoutError(f"{type(layer).__name__}.{name} is not where it should be")


def batch_norm_address(handle: Any) -> int:
    """Return the address of a BatchNorm2d's own fields; raise LayoutError if they are elsewhere."""
    verify_batch_norm()
    return address_of(handle) + find_layout().end


@functools.cache
@layout_errors()
def verify_batch_norm() -> None:
    """Raise LayoutError if the fields of BatchNorm2d are not where they should be."""
    load_engine()
    import cutagi

    norm = cutagi.BatchNorm2d(5, 0.125, 0.75, True, 1.0, 1.0)
    at = address_of(norm) + find_layout().end
    if vector_sizes(words_of(at + 8), 0, 4) is None:
        raise LayoutError("BatchNorm2d's running statistics are not where they should be")
    mean, var, epsilon, momentum, first = batch_norm_statistics(at)
    if not (mean.tolist() == [0] * 5 and var.tolist() == [1] * 5):
        raise LayoutError("BatchNorm2d's running statistics are not where they should be")
    if (epsilon, momentum, first[0]) != (0.125, 0.75, 1):
        raise LayoutError("BatchNorm2d's fields are not where they should be")


def _offsets_of(address: int, expected: list[NDArray[np.float32]]) -> Iterator[int]:
    """Yield the offsets at which vectors with these contents lie behind each other."""
    words = words_of(address)
    sizes = [values.size for values in expected]
    for index in range(len(words)):
        if vector_sizes(words, index, len(sizes)) == sizes and all(
            read_memory(words[index + 3 * k], values.nbytes) == values.tobytes()
            for k, values in enumerate(expected)
        ):
            yield 8 * index


def _counter_offset(cutagi: Any, end: int) -> int:
    """Return the offset of the number that follows the variances which two steps correct."""
    linear = cutagi.Linear(0, 0, True)
    linear.num_weights = 9
    address = address_of(linear)
    network = cutagi.Sequential([linear])
    found: set[int] = set()
    for count in (7, 5):
        linear.mu_w, linear.var_w = [0.0] * 9, [1e-6] * 9
        linear.delta_mu_w = [0.0] * 9
        linear.delta_var_w = [-1.0] * count + [0.0] * (9 - count)
        network.step()
        if list(network.get_neg_var_w_counter().values()) != [count]:
            raise LayoutError("the engine does not count the variances that a step corrects")
        data = read_memory(address, end)
        numbers = struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        here = {4 * index for index, number in enumerate(numbers) if number == count}
        found = found & here if found else here
    return _only("the counter of corrected variances", found)


def _end_of_base(address: int) -> int:
    """Return the offset behind the name of the device, the last field of the base class.

    It is the first such text; behind the layer there may be others.
    """
    words = words_of(address)
    device = int.from_bytes(b"cpu", "little")
    for index in range(len(words) - 2):
        if (
            words[index] == address + 8 * index + 16
            and words[index + 1] == 3
            and words[index + 2] & 0xFFFFFFFF == device
        ):
            return 8 * index + _STRING
    raise LayoutError("the name of the device is not found in memory")


def _only(what: str, offsets: Any) -> int:
    found = sorted(offsets)
    if len(found) != 1:
        raise LayoutError(f"{what}: found at {len(found)} places in memory, expected one")
    return int(found[0])


def _num_weights(layer: Any, name: str) -> int | None:
    """Return the public number of many weights, which costs no copy of them; else None."""
    count = int(getattr(layer, "num_weights", 0))
    return count if name.endswith("_w") and count > _COMPARED else None
