"""The progress of a rank in its epoch, and its comparison between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, Mismatch
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.communicators.levels import Levels

_REMEDY = (
    "last_batch is the number of steps of every rank in an epoch: give all ranks equally many "
    "batches, as DistributedSampler does."
)


class NotSet(AllRanksRaise, RuntimeError, ValueError):
    """The number of batches of an epoch is missing; the other ranks get RanksDiffer."""


class BatchesDiffer(ValueError):
    """Ranks make different numbers of steps in an epoch."""


class Batches:
    """The batches of an epoch: ``done`` is the number of finished ones, ``all`` the total, or None.

    `begin` and `end` are collective calls.

    Args:
        world: all ranks.
        levels: of the same ranks.
    """

    def __init__(self, world: Communicator, levels: Levels) -> None:
        """Begin with an epoch of an unknown number of batches."""
        self._world = world
        self._levels = (levels.node, levels.inter_node)
        self.done = 0
        self.all: int | None = None

    def count(self, batches: int | None) -> None:
        """Set the number of batches; raise TypeError or ValueError if it cannot be one."""
        self.all = None if batches is None else integer("last_batch", batches, 1)

    def begin(self) -> None:
        """Raise NotSet or RanksDiffer, on all ranks, unless all have set the same total."""
        with all_or_none(self._world, "the ranks' epochs", _REMEDY) as same:
            same("last_batch", self.known())

    def known(self) -> int:
        """Return the number of batches; raise NotSet if it is None."""
        if self.all is None:
            raise NotSet("last_batch is not set: set it to the number of batches of an epoch")
        return self.all

    def next(self) -> int:
        """Return the number of the next batch, from 0; raise RuntimeError if all are done."""
        if self.done >= self.known():
            raise RuntimeError(
                f"all {self.all} batches of this epoch are done: call epoch_loss_logic at its end. "
                "last_batch is the number of batches, such as len(loader), not the last one's index"
            )
        return self.done

    def end(self, steps: int) -> None:
        """Raise BatchesDiffer unless all ranks end the epoch with step number ``steps``, from 1.

        Raises Mismatch if another rank makes another call at this time.
        """
        for level in self._levels:
            with all_or_none(level, "the ranks' epochs", _REMEDY, BatchesDiffer) as same:
                same("the last step", f"number {steps}")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Add this rank's progress, and the remedy, to the text of a Mismatch."""
        try:
            yield
        except Mismatch as error:
            here = f"This rank has made {self.done} steps of this epoch's {self.all}"
            raise Mismatch(f"{error} {here}; {_REMEDY}", error.ranks) from error
