"""The memory that the ranks of a host share, for ranks that also tell each other by messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import Communicator, Work
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.errors import Timeout
from tagi_ddp.communicators.shm import create
from tagi_ddp.communicators.single import SingleCommunicator

MemoryOperation = Callable[..., Any]
"""An operation of the host's memory, which takes ``async_op`` and ``timeout`` yet."""

_MORE = 60.0  # seconds by which memory waits longer than a call: the handshake finds the reason


class HostMemory:
    """Rank ``rank`` of the ``size`` ranks of a host that know ``token``; a call of all of them.

    ``handshake`` is to conclude ``call``.
    """

    def __init__(self, rank: int, size: int, token: str, handshake: Handshake, call: Call) -> None:
        self.rank, self.size = rank, size
        self._watch = _Watch()
        self.comm: Communicator = SingleCommunicator(call.limit)
        """Whose operations `run` runs and `begin` begins."""
        if size > 1:

            def connect() -> None:
                self.comm = create(rank, size, token, call.left(), False, self._watch)

            self._watch.during(handshake, connect)

    def run(self, handshake: Handshake, operation: MemoryOperation, *arguments: Any) -> None:
        """Run an operation in this thread, with an eye on the messages."""
        limit = handshake.left() + _MORE
        self._watch.during(handshake, lambda: operation(*arguments, timeout=limit))

    def begin(self, handshake: Handshake, operation: MemoryOperation, *arguments: Any) -> Ready:
        """Begin an operation, to do others meanwhile."""
        limit = handshake.left() + _MORE
        work: Work = operation(*arguments, async_op=True, timeout=limit)

        def ready(seconds: float) -> bool:
            try:
                work.wait(seconds)
            except Timeout:
                if not work.done():
                    return False  # the wait timed out, not the operation
                work.wait(seconds)  # raises the operation's own error
            return True

        return ready

    def empty(self, handshake: Handshake, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Return zeros that lie where all ranks of the host reach them."""
        found = []
        self._watch.during(handshake, lambda: found.append(self.comm.empty(shape, dtype)))
        return found[0]

    def agree(self, handshake: Handshake) -> bool:
        """Return, once all ranks of the host have come, whether they call the same."""
        word = np.frombuffer(handshake.word, np.uint8)
        words = np.empty((self.size, word.size), np.uint8)
        self.run(handshake, self.comm.all_gather, word, words.reshape(-1))
        return bool((words == word).all())

    def abort(self, reason: str) -> None:
        """Let no rank of this host wait here."""
        self.comm.abort(reason)

    def close(self) -> None:
        """Let go of the memory."""
        self.comm.close()


class _Watch:
    """What looks at the messages of an operation that waits; it refers to no communicator."""

    def __init__(self) -> None:
        self._handshake: Handshake | None = None

    def __call__(self) -> None:
        if self._handshake is not None:
            self._handshake.look()

    def during(self, handshake: Handshake, operation: Callable[[], Any]) -> None:
        self._handshake = handshake
        try:
            handshake.run(operation)
        finally:
            self._handshake = None
