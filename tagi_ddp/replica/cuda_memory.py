"""The memory of a CUDA device that the engine has allocated, as tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from tagi_ddp.communicators.nccl.libraries import find_device
from tagi_ddp.engine.pointers import LayoutError


class Memory(Protocol):
    """The memory of a device."""

    device: torch.device

    def owns(self, address: int, count: int) -> bool:
        """Tell whether ``count`` floats at ``address`` are memory of the device."""
        ...

    def tensor_at(self, address: int, count: int) -> Tensor:
        """Return a tensor over ``count`` floats at ``address``, which `owns` has confirmed."""
        ...

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        """Put torch's work in the block behind the engine's so far, and before all that follows."""
        ...


class CudaMemory:
    """The memory of a CUDA device, as the driver and torch know it."""

    def __init__(self, number: int) -> None:
        """Open device ``number``; raise BackendUnavailable if that cannot be done."""
        self.device = torch.device("cuda", number)
        self._driver = find_device(number)

    def owns(self, address: int, count: int) -> bool:
        """Ask the driver about the first and the last byte."""
        ends = (address, address + 4 * count - 1)
        return all(self._driver.owner_of(end) == self.device.index for end in ends)

    def tensor_at(self, address: int, count: int) -> Tensor:
        """Return a tensor that shares the memory; raise LayoutError if torch would copy it."""
        tensor = torch.as_tensor(_Floats(address, count), device=self.device)
        if tensor.data_ptr() != address:
            raise LayoutError(f"torch cannot use the engine's memory on {self.device} in place")
        return tensor

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Order torch's current stream against the engine's, the legacy default stream, by events.

        There is nothing to do where they are the same.
        """
        current = torch.cuda.current_stream(self.device)
        engine = torch.cuda.default_stream(self.device)
        if current == engine:
            yield
            return
        current.wait_stream(engine)
        yield
        engine.wait_stream(current)


class _Floats:
    """Floats on a device, by the CUDA Array Interface."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": "<f4",
            "data": (address, False),
            "stream": 1,  # the legacy default stream
        }
