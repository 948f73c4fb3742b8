"""What MPI does without blocking: single requests, and messages that follow each other."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from tagi_ddp.communicators.host.mpi_library import MPI

# Seconds of polling before the pauses begin: at first, and after something has moved.
_SPIN, _BRIEF = 0.002, 0.0003
_PAUSES = (0.0001, 0.001)  # seconds between two polls: at first, and when they take long
_TYPES = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}

_pending: set[Operation] = set()  # MPI may write to their buffers, even when nothing waits


class Operation(ABC):
    """What MPI does without blocking; it only advances while it is polled."""

    def __init__(self) -> None:
        self._begun = self._moved = time.monotonic()
        _pending.add(self)

    @abstractmethod
    def poll(self) -> bool:
        """Advance; tell whether it is done."""

    def ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.poll():
            now = time.monotonic()
            if now > end:
                return False
            age = now - self._begun
            if age < _SPIN or now - self._moved < _BRIEF:
                os.sched_yield()
            else:
                time.sleep(min(max(age / 100, _PAUSES[0]), _PAUSES[1]))
        _pending.discard(self)
        return True


class Request(Operation):
    """One request of MPI."""

    def __init__(self, request: MPI.Request) -> None:
        super().__init__()
        self._request = request

    def poll(self) -> bool:
        return self._request.Test()


class Steps(Operation):
    """Messages, each of which has to be complete before the next step."""

    def __init__(self, steps: Iterator[MPI.Request]) -> None:
        super().__init__()
        self._steps = steps
        self._request = MPI.REQUEST_NULL
        self._done = False
        self.poll()

    def poll(self) -> bool:
        while not self._done and self._request.Test():
            self._moved = time.monotonic()
            request = next(self._steps, None)
            self._done = request is None
            self._request = request or MPI.REQUEST_NULL
        return self._done


class MpiMessages:
    """The messages of one operation, under one ``tag``."""

    def __init__(self, mpi: MPI.Intracomm, tag: int) -> None:
        self.rank, self.size = mpi.rank, mpi.size
        self._mpi = mpi
        self._tag = tag

    def connect(self, dst: int, src: int) -> Iterator[MPI.Request]:
        return iter(())  # MPI does it

    def send(self, array: np.ndarray, dst: int) -> MPI.Request:
        return self._mpi.Isend([array, mpi_type(array)], dst, self._tag)

    def recv(self, array: np.ndarray, src: int) -> MPI.Request:
        return self._mpi.Irecv([array, mpi_type(array)], src, self._tag)


def mpi_type(array: np.ndarray) -> MPI.Datatype:
    """Return MPI's type of as many bytes as an element has."""
    return _TYPES[array.itemsize]
