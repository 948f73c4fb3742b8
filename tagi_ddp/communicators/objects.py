"""Small Python values over a communicator, as JSON: nothing that is received is ever run."""

from __future__ import annotations

import json
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tagi_ddp.communicators.communicator import Communicator


@runtime_checkable
class HostObjects(Protocol):
    """A communicator of device buffers that gathers the host's objects by itself."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        ...


def all_gather_object(comm: Communicator, obj: Any) -> list[Any]:
    """Return every rank's ``obj``, in rank order: None, bools, numbers, texts, lists and dicts.

    Two collectives: the sizes, then the bytes. Values are sent as JSON, so tuples become lists, and
    keys texts. Other types raise TypeError on the rank that passes them.
    """
    if isinstance(comm, HostObjects):
        return comm.all_gather_object(obj)
    data = np.frombuffer(json.dumps(obj).encode(), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.all_gather(np.array([data.size], np.int64), sizes)
    counts = sizes.tolist()
    gathered = np.empty(sum(counts), np.uint8)
    comm.all_gather(data, gathered, counts)
    return [json.loads(part.tobytes()) for part in np.split(gathered, np.cumsum(counts)[:-1])]
