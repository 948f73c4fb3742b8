"""Buffers on a CUDA device: torch tensors, and objects with CUDA Array Interface or DLPack."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from tagi_ddp._backend import Device
from tagi_ddp.communicators.buffers import (
    FLOATS,
    INTEGERS,
    Elements,
    dtype_of_tensor,
    elements,
    unfit,
    unsupported,
)
from tagi_ddp.communicators.communicator import Buffer
from tagi_ddp.communicators.errors import BackendUnavailable

_LEGACY_STREAM = 1  # the interface's number of CUDA's default stream, whose handle is 0


@dataclass
class DeviceElements(Elements):
    """Elements in a device's memory.

    ``stream`` is the handle of the caller's stream; None for host objects over memory of the device
    (managed memory), which the host itself uses. ``owner`` keeps the memory alive.
    """

    owner: Any
    stream: int | None

    @property
    def memory(self) -> tuple[int, int, str]:
        """The arguments of `NcclRank`: address, number of elements and dtype."""
        return self.address, self.count, self.dtype

    def tensor(self) -> Any:
        """Return the elements as a flat torch tensor that shares their memory."""
        torch = import_torch(self.dtype)
        owner = self.owner
        if isinstance(owner, np.ndarray):
            return torch.from_numpy(owner).reshape(-1)
        return torch.as_tensor(owner).detach().reshape(-1)


def device_elements(
    buffer: Buffer, name: str, device: Device, *, writable: bool = False
) -> DeviceElements:
    """Return the elements of the argument called ``name``, sharing its memory.

    Raises:
        TypeError: it is no array, or its dtype is not supported.
        ValueError: it is not C-contiguous or aligned, not on ``device``, or read-only though
            ``writable``.
    """
    torch = sys.modules.get("torch")
    if isinstance(buffer, np.ndarray):
        host = elements(buffer, name, writable=writable)
        found = DeviceElements(host.dtype, host.count, host.address, buffer, None)
    elif torch is not None and isinstance(buffer, torch.Tensor):
        found = _of_tensor(buffer, name, torch)
        if buffer.is_cuda and buffer.get_device() == device.ordinal:
            return found
    elif hasattr(buffer, "__cuda_array_interface__"):
        found = _of_interface(buffer, name, writable)
    elif hasattr(buffer, "__dlpack__"):
        torch = import_torch("DLPack")
        found = _of_tensor(torch.from_dlpack(buffer), name, torch)
    else:
        raise TypeError(
            f"{name} must be a torch tensor, or give __cuda_array_interface__ or DLPack, got "
            f"{type(buffer).__name__}"
        )
    if found.count and (where := device.owner_of(found.address)) != device.ordinal:
        there = "in the host's memory" if where < 0 else f"on cuda:{where}"
        raise ValueError(
            f"{name} lives {there}, but this communicator's buffers live on cuda:{device.ordinal}; "
            "copy it there first"
        )
    return found


def import_torch(what: str) -> Any:
    """Return torch, which ``what`` needs; raise BackendUnavailable if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable(f"{what} needs torch here: pip install torch") from (error)
    return torch


def _of_tensor(tensor: Any, name: str, torch: Any) -> DeviceElements:
    dtype = dtype_of_tensor(tensor, name, torch)
    stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None
    return DeviceElements(dtype, tensor.numel(), tensor.data_ptr(), tensor, stream)


def _of_interface(buffer: Any, name: str, writable: bool) -> DeviceElements:
    """Read the CUDA Array Interface, version 3."""
    interface = buffer.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    if dtype.name not in FLOATS + INTEGERS or not dtype.isnative:
        raise TypeError(unsupported(name, str(dtype)))
    shape = interface["shape"]
    count, strides = math.prod(shape), interface.get("strides")
    contiguous, expected = True, dtype.itemsize
    if count and strides is not None:
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            contiguous = contiguous and (length == 1 or stride == expected)
            expected *= length
    address, read_only = interface["data"]
    aligned = address % dtype.itemsize == 0
    if not contiguous or not aligned or (writable and read_only):
        raise ValueError(unfit(name, contiguous, aligned))
    stream = interface.get("stream") or _LEGACY_STREAM
    return DeviceElements(
        dtype.name, count, address, buffer, 0 if stream == _LEGACY_STREAM else stream
    )
