"""What takes a while on the host: connecting ranks, filling a stream, and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tagi_ddp._backend import NcclOperation, NcclRank
from tagi_ddp.communicators.nccl.buffers import DeviceElements


class Connector(Protocol):
    """Who makes connections, by name."""

    def connect(self, name: str, rank: int, size: int) -> NcclRank | None:
        """Begin to connect rank ``rank`` of ``size``, or return None: not invited yet."""
        ...

    def await_message(self, seconds: float) -> None:
        """Wait until something is heard of another rank, at most ``seconds``."""
        ...


class Connection:
    """Ranks on their way to each other."""

    def __init__(self, comm: Connector, name: str, rank: int, size: int) -> None:
        """Prepare; rank ``rank`` of ``size`` connects when it is asked whether it is ready."""
        self._comm = comm
        self._name = name
        self._rank = rank
        self._size = size
        self.engine: NcclRank | None = None

    def ready(self, seconds: float) -> bool:
        """Wait up to ``seconds``; tell whether all have come; raise RuntimeError."""
        if self.engine is None:
            self.engine = self._comm.connect(self._name, self._rank, self._size)
        if self.engine is None:
            self._comm.await_message(seconds)
            return False
        return self.engine.ready(seconds)


class Enqueued:
    """An operation on its way into the stream."""

    def __init__(self, operation: NcclOperation) -> None:
        """Follow ``operation``."""
        self._operation = operation

    def ready(self, seconds: float) -> bool:
        """Wait up to ``seconds``; tell whether it is there; raise RuntimeError."""
        return self._operation.enqueued(seconds)


class Message:
    """A message between two ranks, over a connection of their own."""

    def __init__(
        self,
        connection: Connection,
        data: DeviceElements,
        call: Callable[[NcclRank], None],
    ) -> None:
        """Prepare; ``call`` sends or receives ``data``."""
        self._connection = connection
        self._data = data
        self._call = call
        self._operation: NcclOperation | None = None

    def ready(self, seconds: float) -> bool:
        """Wait up to ``seconds``; tell whether it is complete; raise RuntimeError."""
        if self._operation is None:
            if not self._connection.ready(seconds):
                return False
            engine = self._connection.engine
            assert engine is not None
            self._operation = engine.group(self._data.stream, lambda: self._call(engine))
        return self._operation.enqueued(seconds) and self._operation.complete(seconds)
