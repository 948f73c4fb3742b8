"""Small Python objects over a communicator."""

from __future__ import annotations

import pickle
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tagi_ddp.communicators.communicator import Communicator


@runtime_checkable
class HostObjects(Protocol):
    """A communicator whose buffers live elsewhere, with a way of its own for the host's objects."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        ...


def all_gather_object(comm: Communicator, obj: Any) -> list[Any]:
    """Return every rank's ``obj``, in rank order; for small objects that can be pickled.

    Two collectives: the sizes, then the bytes. Unpickling runs code, so all ranks must be trusted.
    """
    if isinstance(comm, HostObjects):
        return comm.all_gather_object(obj)
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.all_gather(np.array([data.size], np.int64), sizes)
    counts = sizes.tolist()
    gathered = np.empty(sum(counts), np.uint8)
    comm.all_gather(data, gathered, counts)
    return [pickle.loads(part.tobytes()) for part in np.split(gathered, np.cumsum(counts)[:-1])]
