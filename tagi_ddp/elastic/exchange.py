"""Exchanges of an elastic job, whose state passes from one group of ranks to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from tagi_ddp._backend import Agreement
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.levels import Levels
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica import Replica
from tagi_ddp.replica.parameter_file import statistics_of
from tagi_ddp.update.exchange import Bucket, Setting
from tagi_ddp.update.merging import Merging
from tagi_ddp.update.not_finite import NotFiniteError
from tagi_ddp.update.reduction import Reduction


class Calls(Protocol):
    """The launcher's calls to join the next group; see `LauncherConnection`."""

    @property
    def awaited(self) -> bool:
        """True if new ranks wait to join, and there is no other reason for a group."""
        ...

    def called(self, progress: int, exchanging: bool) -> bool:
        """Return whether this rank should join the next group at once."""
        ...


class NextGroup(Exception):
    """The ranks must join the next group; nothing has been exchanged."""


class ElasticExchange(Protocol):
    """An exchange that stays with its rank: it begins alone, and joins each group by `enter`."""

    progress: int
    """The number of updates of all ranks that the replica has taken."""
    steps_made: int
    """The number of steps that the posterior includes."""
    steps: int
    """The number of steps of this rank alone since all replicas were equal."""
    between_steps: bool
    """True in a loop over steps: ranks that wait to join are admitted between two of them."""
    awaited: bool
    """True if the ranks have agreed, in the last exchange, that others wait to join."""

    def enter(self, communicator: Communicator) -> None:
        """Switch to another group; a collective call of its ranks."""
        ...

    def take_over(self, source: int, behind: bool) -> None:
        """Copy the state of rank ``source`` to ranks that are ``behind``; a collective call."""
        ...

    def take_lasting(self, source: int, own: list[FloatArray]) -> list[FloatArray]:
        """Return this rank's part of the deltas that add up over steps, so far ``own``."""
        ...

    def make_equal(self) -> None:
        """Make the replicas of all ranks equal, after `take_over`; a collective call."""
        ...


def _require_group(calls: Calls, exchange: ElasticExchange) -> None:
    """Raise `NextGroup` if this rank should join the next group instead of exchanging."""
    joins = not exchange.between_steps and calls.awaited
    if joins or calls.called(exchange.progress, True):
        raise NextGroup("all ranks join the next group")


class ElasticSum(Bucket):
    """Sums or means of deltas, in an elastic job; ``progress`` counts refused steps, too.

    If a rank is lost in a step, the others repeat it, or copy the replica of one that has made it.
    """

    def __init__(self, setting: Setting, calls: Calls) -> None:
        super().__init__(replace(setting, bucket=None))
        self._bucket = setting.replica.zeros()  # that of no group
        self._calls = calls
        self.progress = 0
        self.between_steps = self.awaited = False
        # The sums over all ranks of deltas that add up over steps: none is lost with a rank.
        self._lasting = [
            np.zeros(2 * count, np.float32) for _, count in accumulating_blocks(setting.replica)
        ]

    @property
    def steps_made(self) -> int:
        return self.progress

    @steps_made.setter
    def steps_made(self, steps: int) -> None:
        self.progress = steps

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Make the step with all ranks; raise `NextGroup` if another group is due."""
        _require_group(self._calls, self)
        try:
            # A vote of ``finished`` means here that no rank waits to join.
            self.awaited = not super().__call__(samples, finished=not self._calls.awaited)
        except NotFiniteError:
            self.progress += 1
            raise
        self.progress += 1
        return False

    def _apply(self, agreement: Agreement) -> None:
        super()._apply(agreement)
        assert self._bucket is not None
        halves = self._bucket.reshape(2, -1)
        for total, (begin, count) in zip(
            self._lasting, accumulating_blocks(self._replica), strict=True
        ):
            total.reshape(2, -1)[...] = halves[:, begin : begin + count]

    def enter(self, communicator: Communicator) -> None:
        self._communicator, self.awaited = communicator, False

    def take_over(self, source: int, behind: bool) -> None:
        everyone = all_gather_object(self._communicator, [self.progress, behind])
        if any(late for _, late in everyone):
            self._replica.share(self._communicator, source)
        self.progress = everyone[source][0]
        for total in self._lasting:
            self._communicator.broadcast(total, source)

    def take_lasting(self, source: int, own: list[FloatArray]) -> list[FloatArray]:
        if not self.progress and not any(total.any() for total in self._lasting):
            return own  # No step and no checkpoint has set the sums yet.
        return [total * (self._communicator.rank == source) for total in self._lasting]

    def count_lasting(self, own: list[FloatArray]) -> None:
        for total, part in zip(self._lasting, own, strict=True):
            total[:] = part
            self._communicator.all_reduce(total)

    def make_equal(self) -> None:
        """Do nothing: all ranks are equal."""


class ElasticMerging(Merging):
    """Merges in an elastic job; what a rank learned since the last merge is lost with it.

    ``progress`` counts merges.
    """

    def __init__(self, setting: Setting, reduction: Reduction, calls: Calls) -> None:
        assert isinstance(reduction.sync_every, int)  # `Reduction.check_elastic`
        super().__init__(setting, reduction, reduction.sync_every)
        self._calls = calls
        self.progress = 0
        self.between_steps = self.awaited = False
        for memory in (self._now, self._node.bucket):
            memory.fill(0)  # This allocates it before others wait for this rank.

    @property
    def steps_made(self) -> int:
        return self._all_shares

    @steps_made.setter
    def steps_made(self, steps: int) -> None:
        self._all_shares = steps

    def end_share(self, finished: bool = False) -> bool:
        """Count a share of a batch; raise `NextGroup` if a rank with fewer merges waits."""
        done = super().end_share(finished)
        if self._calls.called(self.progress, False):
            raise NextGroup("all ranks join the next group")
        return done

    def merge(self, finished: bool = False) -> bool:
        """Merge; raise `NextGroup` if another group is due."""
        _require_group(self._calls, self)
        self.make_equal()
        return False

    def enter(self, communicator: Communicator) -> None:
        self._communicator, self.awaited = communicator, False
        self._levels_of_world = Levels(communicator, communicator.size)
        self._node.enter(self._levels_of_world.node)
        self._alone_of = communicator.size if self._warms_up else 1

    def take_over(self, source: int, behind: bool) -> None:
        comm, replica = self._communicator, self._replica
        everyone = all_gather_object(comm, [self.progress, self.steps_made, behind])
        self.progress = everyone[source][0]
        # Slower ranks skip their remaining steps since the last merge.
        self._all_shares = max(steps for _, steps, _ in everyone)
        if not any(late for _, _, late in everyone):
            return
        replica.pull()
        self._node.take_over(source)
        for arrays in statistics_of(replica.state()).values():
            for array in arrays:
                comm.broadcast(array if behind else array.copy(), source)
        if behind:  # The others have merged what this rank has learned, or it is dropped.
            self._begin()
            self._node.steps = 0
            self._write()

    def take_lasting(self, source: int, own: list[FloatArray]) -> list[FloatArray]:
        return own

    def make_equal(self) -> None:
        """Merge what the ranks have learned since the last merge; a collective call."""
        try:
            self.awaited = not super().merge(finished=not self._calls.awaited)
        except NotFiniteError:  # All other steps have been merged.
            self.progress += 1
            raise
        self.progress += 1


def accumulating_blocks(replica: Replica) -> list[tuple[int, int]]:
    """Return (begin, count) of the layers' weights whose deltas add up over steps."""
    blocks = replica.parameters.blocks[::2]
    return [block for layer, block in zip(replica.layers, blocks, strict=True) if layer.accumulates]
