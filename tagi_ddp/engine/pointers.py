"""The addresses of the engine's objects, from pybind11's conduit (`_pybind11_conduit_v1_`)."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from typing import Any

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
_POINTER = b"raw_pointer_ephemeral"  # the kind of pointer that the conduit is asked for
_TYPE_INFO_NAME = b"St9type_info"  # typeid(std::type_info).name(). It must outlive the capsule.


class LayoutError(RuntimeError):
    """The layout of the engine's memory is not found, or is not as expected."""


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
    capsule = conduit(engine_abi(), _type_info(kind), _POINTER)
    if capsule is None:
        raise LayoutError(f"{type(handle).__name__} is no {kind}")
    name = _capsule_function("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)(capsule)
    get = _capsule_function(
        "PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
    )
    return int(get(capsule, name))


@functools.cache
def engine_abi() -> bytes:
    """Return pybind11's name of the ABI that the engine was built for; LayoutError if not known."""
    import cutagi

    conduit = cutagi.ReLU()._pybind11_conduit_v1_
    for abi in _platform_abis():
        if conduit(abi, _type_info("BaseLayer"), _POINTER) is not None:
            return abi
    raise LayoutError("the engine was built by a compiler whose ABI is not known")


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
