"""The ranks of a replica: their communicator and exchange, and the errors between them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

from tagi_ddp.communicators import Communicator, CommunicatorError
from tagi_ddp.communicators.guard import CanAbort, or_abort, report
from tagi_ddp.update.exchange import Exchange
from tagi_ddp.update.not_finite import refusal


class Ranks:
    """The group of ranks that train the replicas of one network.

    ``communicator`` connects them, ``exchange`` makes their replicas equal; in an elastic job both
    are those of the present group.
    """

    exchange: Exchange
    """It is set once the replica exists."""

    def __init__(self, communicator: Communicator, own: bool) -> None:
        """Use ``communicator``; `close` closes it if it is the model's ``own``."""
        self.communicator = communicator
        self.closed = False
        self._own = own

    def or_abort(self) -> AbstractContextManager[None]:
        """Report an error in the block to the other ranks, so that none waits for this one."""
        self.require_open()
        return or_abort(self.groups())

    def require_open(self) -> None:
        """Raise CommunicatorError if the model is closed."""
        if self.closed:
            raise CommunicatorError("the model is closed; wrap it again to go on")

    def give_up(self, error: BaseException) -> None:
        """Report an error to the other ranks."""
        report(self.groups(), error)

    def groups(self) -> Iterator[CanAbort]:
        """Yield all that other ranks may wait on."""
        yield self.communicator
        if hasattr(self, "exchange"):
            yield self.exchange

    def close(self) -> None:
        """Leave the group; warn if a step on the device was refused and nobody knows yet."""
        if self.closed:
            return
        self.closed = True
        exchange: Exchange | None = getattr(self, "exchange", None)
        if exchange is not None:
            exchange.close()
        if self._own:
            self.communicator.close()
        if exchange is not None and (ranks := exchange.take_refused(everything=True)):
            warnings.warn(refusal("a step before close() was", ranks), RuntimeWarning, stacklevel=3)
