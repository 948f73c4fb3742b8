"""A replica's flat buffers on the way of a collective: memory for it, and copies on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.communicators import Buffer, Communicator
from tagi_ddp.engine.buffers import FloatArray


def host_bucket(communicator: Communicator, size: int, more: int = 0) -> FloatArray:
    """Return zeros for the deltas of ``size`` parameters, [means | variances], on the host.

    And for so many ``more`` numbers. In the communicator's own memory, if it has any: there, a
    reduction stages nothing.
    """
    bucket: FloatArray = communicator.empty(2 * size + more)
    bucket.fill(0)
    return bucket


class Sum:
    """A sum over the ranks of a group, in place, under way."""

    def __init__(self, communicator: Communicator, buffer: Buffer) -> None:
        self._buffer = buffer
        self._staged = to_host(communicator, buffer)
        self._work = communicator.all_reduce(self._staged, async_op=True)

    def wait(self) -> None:
        """Return when the sum is in the buffer."""
        assert self._work is not None
        self._work.wait()
        if self._staged is not self._buffer:
            self._buffer.copy_(self._staged)


def broadcast(
    communicator: Communicator, buffer: Buffer, root: int, timeout: float | None = None
) -> None:
    """Copy the buffer of rank ``root`` to all."""
    staged = to_host(communicator, buffer)
    communicator.broadcast(staged, root, timeout=timeout)
    if staged is not buffer:
        buffer.copy_(staged)


def as_array(buffer: Buffer) -> NDArray[Any]:
    """Return a flat buffer, or a copy on the host if it is on a device, for `fill` to read."""
    if isinstance(buffer, np.ndarray):
        return buffer
    array: NDArray[Any] = buffer.cpu().numpy()
    return array


def fill(buffer: Buffer, values: NDArray[Any]) -> None:
    """Write what `as_array` has returned; ValueError unless that is as long."""
    if len(buffer) != len(values):
        raise ValueError(f"there are {len(values)} numbers for {len(buffer)}")
    buffer[:] = values if isinstance(buffer, np.ndarray) else buffer.new_tensor(values)


def to_host(communicator: Communicator, buffer: Buffer) -> Buffer:
    """Return the buffer, or, if the communicator's buffers are on the host, a copy there."""
    on_device = getattr(buffer, "is_cuda", False) and communicator.device == "cpu"
    return buffer.cpu() if on_device else buffer
