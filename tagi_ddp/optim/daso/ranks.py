"""All ranks of DASO on two levels, and what they learn when one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tagi_ddp.communicators import Communicator, CommunicatorError, as_communicator, init
from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.communicators.hierarchy import Hierarchy
from tagi_ddp.communicators.init import is_made_for


class Ranks:
    """All ranks, those of this one's node, and the levels between.

    Args:
        world: what `adopt` returned, in ``made``; None: `init()`.
        node_size: see `Hierarchy`.
        made: what `close` closes.
    """

    def __init__(self, world: Communicator | None, node_size: int | None, made: ExitStack) -> None:
        """Split the ranks; a collective call."""
        self.world = world or made.enter_context(init())
        self.levels = Hierarchy(self.world, node_size)
        made.callback(self.levels.close)
        self._made = made.pop_all()
        self._closed = False

    @contextmanager
    def or_abort(self) -> Iterator[None]:
        """Let the other ranks know when this one fails alone, so that none waits for it."""
        if self._closed:
            raise CommunicatorError("this DASO is closed; make a new one")
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """Tell all of ``error``, unless they have it too."""
        if self._closed or isinstance(error, AllRanksRaise):
            return
        reason = f"{type(error).__name__}: {error}"
        self.levels.abort(reason)
        with suppress(CommunicatorError):  # it may be closed
            self.world.abort(reason)

    def close(self) -> None:
        """Close what was made; may be called again."""
        self._closed = True
        self._made.close()


def adopt(group: Any, made: ExitStack) -> Communicator | None:
    """Return ``group`` as a communicator; one that wraps it closes with ``made``."""
    if group is None:
        return None
    try:
        communicator = as_communicator(group)
    except TypeError:
        raise TypeError(
            "comm must be a communicator, a torch.distributed.ProcessGroup or one of mpi4py, got "
            f"{group!r}"
        ) from None
    own = is_made_for(communicator, group)
    return made.enter_context(communicator) if own else communicator
