"""The addresses of the engine's layers, and the verification of their memory layout.

pybind11's conduit (`_pybind11_conduit_v1_`) gives the C++ address of an engine object. The layout
of its memory is an assumption about another project's binary (cpp_backend/engine/layer_layout.h),
so it is verified against the public interface before anything is read or written.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tagi_ddp._backend import batch_norm_statistics, engine_layer
from tagi_ddp.engine.layers import DELTAS, PARAMETERS
from tagi_ddp.engine.loader import load_engine

_SCALARS = (
    *("input_size", "output_size", "num_weights", "num_biases", "in_width", "in_height"),
    *("in_channels", "out_width", "out_height", "out_channels", "bias", "num_threads", "training"),
)
# pybind11's names for the ABIs of gcc and clang on Linux, of which the engine's is one: those of
# version 3, then those of version 2 by the number of the ABI, which a compiler's version decides.
_ABIS = (
    b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1",
    b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_0",
    *(
        f"_{compiler}_libstdcpp_cxxabi{number}".encode()
        for compiler in ("gcc", "clang")
        for number in (*range(1002, 1030), 2000)
    ),
)
_COMPARED = 1024  # vectors of at most so many elements are compared; others are slow to copy
_TYPE_INFO_NAME = b"St9type_info"  # typeid(std::type_info).name(). It must outlive the capsule.


class LayoutError(RuntimeError):
    """The engine's memory has another layout than the one this package is written for."""


@contextlib.contextmanager
def layout_errors() -> Iterator[None]:
    """Raise LayoutError in place of any error of the block, which looks at unknown memory."""
    try:
        yield
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(f"{type(error).__name__}: {error}") from error


def address_of(handle: Any, kind: str = "BaseLayer") -> int:
    """Return the address of the C++ object of class ``kind`` behind an engine object.

    Raises LayoutError if the engine does not provide it.
    """
    conduit = getattr(handle, "_pybind11_conduit_v1_", None)
    if conduit is None:
        raise LayoutError(f"{type(handle).__name__} has no pybind11 conduit")
    for abi in _platform_abis():
        capsule = conduit(abi, _type_info(kind), b"raw_pointer_ephemeral")
        if capsule is not None:
            name = _capsule_function("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)(
                capsule
            )
            get = _capsule_function(
                "PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
            )
            return int(get(capsule, name))
    raise LayoutError("the engine was built by a compiler whose ABI is not known")


@layout_errors()
def check_layer(layer: Any, address: int) -> None:
    """Raise LayoutError unless the memory at ``address`` agrees with the public ``layer``.

    Compares the scalar fields, the sizes of vectors, and the contents of short ones. No element is
    read of a vector whose size is not the public one.
    """
    memory = engine_layer(address)
    for name in _SCALARS:
        if hasattr(layer, name) and getattr(layer, name) != getattr(memory, name):
            raise LayoutError(f"{type(layer).__name__}.{name} is not where it should be")
    for name in PARAMETERS + DELTAS:
        size = memory.size(name)
        differs = size != _num_weights(layer, name) and size != len(getattr(layer, name))
        if not differs and size <= _COMPARED:
            public = np.asarray(getattr(layer, name), np.float32)
            differs = not np.array_equal(memory.vector(name), public, equal_nan=True)
        if differs:
            raise LayoutError(f"{type(layer).__name__}.{name} is not where it should be")


def _num_weights(layer: Any, name: str) -> int | None:
    """Return the public number of many weights, which costs no copy of them; else None."""
    count = int(getattr(layer, "num_weights", 0))
    return count if name.endswith("_w") and count > _COMPARED else None


@functools.cache
@layout_errors()
def verify_layout() -> None:
    """Verify the layout on small layers, for reads and writes, once per process.

    Raises LayoutError.
    """
    load_engine()
    import cutagi

    linear = cutagi.Linear(3, 2, True, 1.0, 1.0, "He", 0)
    address = address_of(linear)
    memory = engine_layer(address)
    for count, name in enumerate(PARAMETERS + DELTAS, start=3):
        values = (np.arange(count, dtype=np.float32) + 0.5) * count
        setattr(linear, name, values.tolist())
        if memory.size(name) != count or not np.array_equal(memory.vector(name), values):
            raise LayoutError(f"a public write to {name} does not show in memory")
        memory.vector(name)[:] = -values
        if not np.array_equal(np.asarray(getattr(linear, name), np.float32), -values):
            raise LayoutError(f"a write to {name} in memory does not show publicly")
    for position, name in enumerate(name for name in _SCALARS if "_" in name):
        setattr(linear, name, 1000 + position)
    check_layer(linear, address)
    memory.neg_var_w_counter[0] = 17
    if list(cutagi.Sequential([linear]).get_neg_var_w_counter().values()) != [17]:
        raise LayoutError("the counter of negative variances is not where it should be")

    norm = cutagi.BatchNorm2d(5, 0.125, 0.75, True, 1.0, 1.0)
    mean, var, eps, momentum, first = batch_norm_statistics(address_of(norm))
    expected = np.zeros(5, np.float32), np.ones(5, np.float32)
    if not (np.array_equal(mean, expected[0]) and np.array_equal(var, expected[1])):
        raise LayoutError("BatchNorm2d's running statistics are not where they should be")
    if (eps, momentum, first[0]) != (0.125, 0.75, 1):
        raise LayoutError("BatchNorm2d's fields are not where they should be")


@functools.cache
def _type_info(kind: str) -> Any:
    """Return a capsule with the address of the ``std::type_info`` of an engine class."""
    import cutagi

    try:
        info = ctypes.c_char.in_dll(ctypes.CDLL(cutagi.__file__), f"_ZTI{len(kind)}{kind}")
    except ValueError as error:
        raise LayoutError(f"the engine does not export {kind}'s type") from error
    new = _capsule_function(
        "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    )
    return new(ctypes.addressof(info), _TYPE_INFO_NAME, None)


@functools.cache
def _platform_abis() -> tuple[bytes, ...]:
    """Return the pybind11 ABIs of the extensions in this process; the engine's is one of them.

    Extensions of pybind11 3, with which users may have built the engine, do not register theirs.
    """
    pattern = re.compile(r"__pybind11_internals_v\d+(_.+?)__$")
    found = (pattern.match(name) for name in vars(builtins))
    return (*{match[1].encode(): None for match in found if match}, *_ABIS)


@functools.cache
def _capsule_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of Python's C interface, with its own prototype: ctypes' is shared."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
