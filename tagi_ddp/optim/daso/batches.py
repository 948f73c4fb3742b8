"""Where a rank is in its epoch, and that all ranks are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, Mismatch
from tagi_ddp.communicators.equality import Entry, require_equal
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
    """The batches of an epoch: how many are ``done``, and how many there are, or None.

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
        """Take the number of batches; TypeError or ValueError if it is none."""
        self.all = None if batches is None else integer("last_batch", batches, 1)

    def begin(self) -> None:
        """Raise NotSet or RanksDiffer, on all ranks, unless all have the same number of them."""

        def described() -> Iterable[Entry]:
            yield "last_batch", str(self.known())

        require_equal(self._world, described, "the ranks' epochs", _REMEDY)

    def known(self) -> int:
        """Return the number of batches; NotSet if there is none."""
        if self.all is None:
            raise NotSet("last_batch is not set: give it the number of batches of an epoch")
        return self.all

    def next(self) -> int:
        """Return the number of the next one, from 0; RuntimeError if all are done."""
        if self.done >= self.known():
            raise RuntimeError(
                f"all {self.all} batches of this epoch are done: call epoch_loss_logic at its end. "
                "last_batch is the number of batches, such as len(loader), not the last one's index"
            )
        return self.done

    def end(self, steps: int) -> None:
        """Raise BatchesDiffer unless all ranks end the epoch with step number ``steps``, from 1.

        A rank that is elsewhere meets this with another call: that is a Mismatch.
        """

        def described() -> Iterable[Entry]:
            yield "the last step", f"number {steps}"

        for level in self._levels:
            require_equal(level, described, "the ranks' epochs", _REMEDY, BatchesDiffer)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Say in a Mismatch where this rank is, and where all should be."""
        try:
            yield
        except Mismatch as error:
            here = f"This rank has made {self.done} steps of this epoch's {self.all}"
            raise Mismatch(f"{error} {here}; {_REMEDY}", error.ranks) from error
