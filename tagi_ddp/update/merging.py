"""Replicas that step alone and merge their posteriors by Bayes' rule: information adds.

What a rank has learned since all were equal is a change of precisions and weighted means; the sum
of the ranks' changes is what all have learned together (cpp_backend/update/merge.h). So no sample
counts twice, however many steps lie between two merges, and whenever a change arrives.
"""

from __future__ import annotations

from typing import Literal

from tagi_ddp._backend import Agreement, Contribution
from tagi_ddp.checks import integer, real
from tagi_ddp.communicators import Buffer, Communicator, all_gather_object
from tagi_ddp.communicators.hierarchy import Hierarchy
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.replica.protocol import Replica
from tagi_ddp.replica.staging import Sum, broadcast
from tagi_ddp.update.exchange import Exchange, Setting, vote
from tagi_ddp.update.not_finite import NotFiniteError, refusal

Reduction = Literal["mean", "sum", "precision"]
_REDUCTIONS = ("mean", "sum", "precision")


def check_reduction(
    reduction: Reduction | None,
    average: bool,
    sync_every: int | SyncSchedule,
    node_size: int | None,
    sharded: bool,
) -> Reduction:
    """Return how replicas become one; raise TypeError or ValueError that names the argument."""
    if reduction is None:
        reduction = "mean" if average else "sum"
    if reduction not in _REDUCTIONS:
        raise ValueError(f'reduction must be "mean", "sum" or "precision", got {reduction!r}')
    often = not isinstance(sync_every, SyncSchedule) and integer("sync_every", sync_every, 1) == 1
    if reduction != "precision" and not (often and node_size is None):
        raise ValueError(
            f"reduction={reduction!r} sums deltas at every step; sync_every and node_size are for "
            '"precision"'
        )
    if reduction == "precision" and sharded:
        raise ValueError('sharded is for sums and means of deltas, got True with "precision"')
    return reduction


def make_merging(
    setting: Setting, sync_every: int | SyncSchedule, node_size: int | None
) -> Merging:
    """Return what merges the replicas every so many steps, or when a schedule says so."""
    if isinstance(sync_every, SyncSchedule):
        return ScheduledMerging(setting, node_size, sync_every)
    return Merging(setting, node_size, integer("sync_every", sync_every, 1))


class Merging(Exchange):
    """Merges the replicas of all ranks after every ``every`` steps.

    There are three posteriors: this rank's own; its node's; and the one that all nodes have in
    common. Each is the next one, times what has been learned since it was told. What a node has
    learned is sent by one of its ranks; when all nodes' changes have arrived they go into the
    common posterior, and into the node's, which has its own change already.

    ``guarded`` counts by layer the parameters that have taken only a part of a merge so far.
    """

    def __init__(self, setting: Setting, node_size: int | None, every: int = 1) -> None:
        super().__init__(setting)
        replica = setting.replica
        self._every = every
        self._hierarchy = Hierarchy(setting.communicator, node_size)
        self._now = replica.zeros()
        self._node = Consensus(self._hierarchy.node, replica)
        if self._hierarchy.nodes > 1:
            self._common = Consensus(self._hierarchy.inter_node, replica)
            self._sent = replica.zeros()  # this node's change that is in flight
        self._sum: Sum | None = None  # of all nodes' changes, on the ranks that send them
        self._sender: int | None = None  # their node rank; None: nothing is in flight
        self._samples = 0  # since the last merge of all
        self._culprit = ""  # the layer that made a step since then be refused
        self.steps = 0
        self.guarded = [0] * len(replica.layers)

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Step alone, and merge if it is time to."""
        self._step(samples, finished)
        return (finished or self.steps == self._every) and self.merge(finished)

    def merge(self, finished: bool = False) -> bool:
        """Merge what all ranks have learned, and what is in flight; a collective call.

        Tells whether all ranks have finished. Raises NotFiniteError if a step since the last merge
        was refused: all others have been merged.
        """
        agreement, culprit = self._vote(finished), self._culprit
        self._merge_node()
        if self._sender is not None:
            self._receive()
        if self._hierarchy.nodes > 1:
            self._send(0)
            self._receive()
            self._node.gaussians[:] = self._common.gaussians  # up to rounding it is
        self._write()
        if agreement.batch:
            self._replica.average_statistics(self._communicator, self._samples, agreement.batch)
        self._begin()
        if ranks := agreement.not_finite:
            raise NotFiniteError(refusal("steps since the last merge were", ranks, culprit), ranks)
        return agreement.all_finished

    def take_refused(self, everything: bool) -> list[int]:
        """Return nothing: ranks step alone, and tell each other at the next merge."""
        return []

    def restart(self) -> None:
        if self._sum is not None:
            self._sum.wait()
        self._sum = self._sender = None
        self._replica.pull()
        self._node.begin()
        if self._hierarchy.nodes > 1:
            self._common.begin()
        self._begin()

    def abort(self, reason: str) -> None:
        self._hierarchy.abort(reason)

    def close(self) -> None:
        """Close the levels."""
        self._hierarchy.close()

    def _begin(self) -> None:
        self.steps = self._samples = 0
        self._culprit = ""

    def _step(self, samples: int, finished: bool) -> None:
        """Apply this rank's own deltas, capped by its own batch; not if they are not finite."""
        self.steps += not finished
        culprit = self._replica.step_alone(samples)
        self._culprit = self._culprit or culprit
        if not culprit:
            self._samples += samples

    def _vote(self, finished: bool) -> Agreement:
        refused = bool(self._culprit or self._replica.take_refused(everything=True))
        return vote(self._communicator, Contribution(self._samples, not refused, finished))

    def _merge_node(self) -> None:
        self._replica.pull()
        self._replica.parameters.read_posterior(self._now)
        self._count(self._node.merge(self._now))

    def _send(self, sender: int) -> None:
        """Begin to add up the changes of all nodes since the common posterior."""
        common, node = self._common, self._node.gaussians
        self._replica.parameters.change_since(node, common.gaussians, self._sent)
        self._sender = sender
        if self._hierarchy.node.rank == sender:
            common.change[:] = self._sent
            self._sum = Sum(self._hierarchy.inter_node, common.change)

    def _receive(self) -> None:
        """Wait for the changes of all nodes, and take them into both posteriors."""
        if self._sum is not None:
            self._sum.wait()
        assert self._sender is not None
        change, common = self._common.change, self._common.gaussians
        broadcast(self._hierarchy.node, change, self._sender)
        self._sum = self._sender = None
        add = self._replica.parameters.add_change
        self._count(add(self._node.gaussians, common, change, self._sent))
        self._count(add(common, common, change))

    def _write(self) -> None:
        """Go on with the node's posterior."""
        self._replica.parameters.write_posterior(self._node.gaussians)
        self._replica.updated()

    def _count(self, guarded: list[int]) -> None:
        self.guarded = [sum(pair) for pair in zip(self.guarded, guarded, strict=True)]


class ScheduledMerging(Merging):
    """Merges the ranks of a node often, and nodes seldom and without waiting, by a schedule."""

    def __init__(self, setting: Setting, node_size: int | None, schedule: SyncSchedule) -> None:
        super().__init__(setting, node_size)
        self._schedule = schedule
        self._batch = self._batches = 0  # of this epoch

    def begin_epoch(self, batches: int) -> None:
        """Tell the number of batches of the epoch that begins, the same on all ranks."""
        if self._batches:
            raise RuntimeError("begin_epoch() needs an end_epoch() after the epoch before")
        self._batches = integer("batches", batches, 1)

    def end_epoch(self, loss: float) -> float:
        """Merge what is left, tell the schedule the mean of the ranks' losses, and return that."""
        loss = real("loss", loss)
        problem: NotFiniteError | None = None
        try:
            if self.steps:
                self.merge()
        except NotFiniteError as error:  # on all ranks, which end the epoch all the same
            problem = error
        mean: float = sum(all_gather_object(self._communicator, loss)) / self._communicator.size
        self._schedule.end_epoch(mean)
        self._batch = self._batches = 0
        if problem is not None:
            raise problem
        return mean

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Step alone, and do what the schedule says."""
        if finished:
            raise RuntimeError(
                "join() is not for a schedule, by which all ranks make equally many steps: give a "
                "rank without data empty shares"
            )
        if self._batch == self._batches:
            raise RuntimeError(
                f"step number {self._batch} of this epoch, of {self._batches}: a schedule needs "
                "begin_epoch(batches) before an epoch, and end_epoch(loss) after it"
            )
        self._step(samples, finished)
        sync = self._schedule.after(self._batch, self._batches)
        self._batch += 1
        if sync.blocking:
            return self.merge()
        if sync.local:
            self._merge_node()
            if sync.merge and self._sender is not None:  # not if merge() was called meanwhile
                self._receive()
            if sync.send is not None and self._hierarchy.nodes > 1:
                self._send(sync.send % self._hierarchy.node.size)
            self._write()
        return False


class Consensus:
    """The posterior of all that the ranks of a group have told each other; equal on all of them."""

    def __init__(self, communicator: Communicator, replica: Replica) -> None:
        self._communicator = communicator
        self._replica = replica
        self.gaussians = replica.zeros()
        self.change = replica.bucket(communicator)  # room for one
        self.begin()

    def begin(self) -> None:
        """Begin anew with the present state."""
        self._replica.parameters.read_posterior(self.gaussians)

    def merge(self, now: Buffer) -> list[int]:
        """Take in what each rank has learned, which has led it ``now`` to another posterior.

        Returns how many parameters of each layer took only a part of it.
        """
        parameters = self._replica.parameters
        if self._communicator.size == 1:
            self.gaussians[:] = now
            return [0] * len(self._replica.layers)
        parameters.change_since(now, self.gaussians, self.change)
        Sum(self._communicator, self.change).wait()
        return parameters.add_change(self.gaussians, self.gaussians, self.change)
