"""The communicator of a world of one: every operation is complete at once."""

from __future__ import annotations

from tagi_ddp.communicators.base import BaseCommunicator
from tagi_ddp.communicators.buffers import HostElements, elements
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.errors import CommunicatorError
from tagi_ddp.communicators.operations import Call


class SingleCommunicator(BaseCommunicator[HostElements, None]):
    """A group whose only rank is this process."""

    backend = "single"
    concurrent = False  # Operations never wait.

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Make rank 0 of 1; nothing ever waits for ``timeout`` seconds."""
        super().__init__(0, 1, timeout)

    _elements = staticmethod(elements)

    def _copy(
        self, call: Call, source: HostElements, target: HostElements, *_: object, **__: object
    ) -> None:
        target.array[...] = source.array

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _copy

    def _broadcast(self, call: Call, data: HostElements, root: int) -> None:
        pass

    def _message(self, call: Call, data: HostElements, peer: int) -> None:
        raise AssertionError("there is no other rank")

    def _barrier(self, call: Call) -> None:
        pass

    def _split(self, call: Call, color: int | None, key: int) -> SingleCommunicator | None:
        return None if color is None else SingleCommunicator(self.timeout)

    def _is_forked(self) -> bool:
        return False  # A fork is a world of one, too.

    def _fail(self, error: CommunicatorError, reason: str = "") -> None:
        pass  # Operations continue: no other rank can be out of step.

    def _announce(self, error: CommunicatorError, reason: str) -> None:
        pass

    def _leave(self) -> None:
        pass
