"""Memory for collectives on flat buffers, and copies on the communicator's device."""

from __future__ import annotations

from typing import Any

import numpy as np

from tagi_ddp.communicators import Buffer, Communicator
from tagi_ddp.engine.buffers import FloatArray


def host_bucket(communicator: Communicator, size: int, more: int = 0) -> FloatArray:
    """Return zeros for the deltas of ``size`` parameters, [means | variances], on the host.

    ``more`` numbers follow. They are in memory that the ranks share, if the communicator has any: a
    reduction there copies nothing.
    """
    bucket: FloatArray = communicator.empty(2 * size + more)
    bucket.fill(0)
    return bucket


class Sum:
    """An in-place sum over the ranks of a group, in progress."""

    def __init__(self, communicator: Communicator, buffer: Buffer, device: str) -> None:
        self._buffer = buffer
        self._staged = staged(communicator, buffer, device)
        self._work = communicator.all_reduce(self._staged, async_op=True)

    def wait(self) -> None:
        """Return when the sum is in the buffer."""
        assert self._work is not None
        self._work.wait()
        _copy_back(self._staged, self._buffer)


def broadcast(
    communicator: Communicator,
    buffer: Buffer,
    root: int,
    device: str,
    timeout: float | None = None,
) -> None:
    """Copy the buffer of rank ``root`` to all."""
    staging = staged(communicator, buffer, device)
    communicator.broadcast(staging, root, timeout=timeout)
    _copy_back(staging, buffer)


def staged(communicator: Communicator, buffer: Buffer, device: str) -> Any:
    """Return the buffer, or a copy where the communicator's buffers live: ``device``, or the host.

    ``device`` is that of the replica.
    """
    if communicator.device == "cpu":
        return buffer if isinstance(buffer, np.ndarray) or not buffer.is_cuda else buffer.cpu()
    if isinstance(buffer, np.ndarray):
        import torch

        return torch.from_numpy(buffer).to(device)
    return buffer


def _copy_back(source: Any, buffer: Buffer) -> None:
    if source is buffer:
        return
    if isinstance(buffer, np.ndarray):
        buffer[...] = as_array(source)
    else:
        buffer.copy_(source)


def as_array(buffer: Any) -> Any:
    """Return a buffer of `staged` as a numpy array."""
    return buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy()
