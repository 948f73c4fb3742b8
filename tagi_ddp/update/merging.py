"""Replicas that step alone and merge their posteriors by Bayes' rule: information adds.

What a rank has learned since all were equal is a change of precisions and weighted means; the sum
of the ranks' changes is what all have learned together (cpp_backend/update/merge.h). So no sample
counts twice, however many steps lie between two merges, and whenever a change arrives.
"""

from __future__ import annotations

from typing import Any, Literal

from tagi_ddp._backend import Agreement, Contribution, Parameters
from tagi_ddp.checks import integer, real
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.hierarchy import Hierarchy
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.replica.bucket import make_bucket
from tagi_ddp.update.exchange import Exchange, agree

Reduction = Literal["mean", "sum", "precision"]
_REDUCTIONS = ("mean", "sum", "precision")

_GO_ON = Agreement([Contribution(1)])  # of a rank that asks nobody


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
    communicator: Communicator, replica: Any, sync_every: int | SyncSchedule, node_size: int | None
) -> Merging:
    """Return what merges ``replica`` every so many steps, or when a schedule says so."""
    if isinstance(sync_every, SyncSchedule):
        return ScheduledMerging(communicator, replica, node_size, sync_every)
    return Merging(communicator, replica, node_size, integer("sync_every", sync_every, 1))


class Merging(Exchange):
    """Merges the replicas of all ranks after every ``every`` steps.

    There are three posteriors: this rank's own; its node's; and the one that all nodes have in
    common. Each is the next one, times what has been learned since it was told. What a node has
    learned is sent by one of its ranks; when all nodes' changes have arrived they go into the
    common posterior, and into the node's, which has its own change already.

    ``steps`` are those of this rank since the last merge of all, ``guarded`` how many parameters of
    each layer have taken only a part of a merge so far.
    """

    def __init__(
        self, communicator: Communicator, replica: Any, node_size: int | None, every: int = 1
    ) -> None:
        """Begin with replicas that are equal."""
        super().__init__(communicator, replica.statistics)
        self._replica = replica
        self._on_host = isinstance(replica.parameters, Parameters)
        self._every = every
        self._alone = SingleCommunicator()
        self._levels = Hierarchy(communicator, node_size)
        self._now = replica.zeros()
        self._node = Consensus(self._levels.node, replica)
        if self._levels.nodes > 1:
            self._common = Consensus(self._levels.inter_node, replica)
            self._sent = replica.zeros()  # this node's change that is under way
        self._sum: Sum | None = None  # of all nodes' changes, on the ranks that send them
        self._sender: int | None = None  # their place on the node; None: nothing is under way
        self._samples = 0  # since the last merge of all
        self._culprit = ""  # the layer that made a step since then be refused
        self._told = ""  # that of the last merge
        self.steps = 0
        self.guarded = [0] * len(replica.layers)

    def first_not_finite(self, parameters: Any) -> str:
        """Return the layer's name, and remember it; on a device, that comes with the merge."""
        if not self._on_host:
            return ""
        name = super().first_not_finite(parameters)
        self._culprit = self._culprit or name
        return name

    def refusal(self, ranks: list[int], culprit: str) -> str:
        """Return the text of a NotFiniteError."""
        where = f" (here: layer {self._told})" if self._told else ""
        return (
            f"deltas of ranks {ranks} were NaN or infinite in steps since the last merge{where}. "
            "These have changed no parameter; all other steps have been merged. Look at the "
            "inputs, the targets and the observation variance of those ranks."
        )

    def __call__(self, parameters: Any, contribution: Contribution, average: bool) -> Agreement:
        """Step alone, and merge if it is time to."""
        self._step(parameters, contribution)
        if contribution.finished or self.steps == self._every:
            return self.merge(contribution.finished)
        return _GO_ON

    def merge(self, finished: bool = False) -> Agreement:
        """Merge what all ranks have learned, and what is under way; a collective call."""
        agreement = self._agree(finished)
        self._merge_node()
        if self._sender is not None:
            self._receive()
        if self._levels.nodes > 1:
            self._send(0)
            self._receive()
            self._node.gaussians[:] = self._common.gaussians  # up to rounding it is
        self._write()
        if agreement.batch:
            self._average(agreement.batch)
        self._begin()
        return agreement

    def restart(self) -> None:
        """Begin anew with replicas that have been made equal by other means."""
        if self._sum is not None:
            self._sum.wait()
        self._sum = self._sender = None
        self._replica.pull()
        self._node.begin()
        if self._levels.nodes > 1:
            self._common.begin()
        self._begin()

    def average_statistics(self, batch: int, total: int) -> None:
        """Do nothing: a merge does it."""

    def abort(self, reason: str) -> None:
        """Let those know who wait on one of the levels."""
        self._levels.abort(reason)

    def close(self) -> None:
        """Close the levels."""
        self._levels.close()

    def _begin(self) -> None:
        self.steps = self._samples = 0
        self._told, self._culprit = self._culprit, ""

    def _step(self, parameters: Any, contribution: Contribution) -> None:
        """Apply this rank's own deltas, capped by its own batch; not if they are not finite."""
        self.steps += not contribution.finished
        own = Agreement([contribution])
        if not own.applies:
            return
        if self._on_host:
            parameters.apply_own(own.cap(False))
        else:
            self._replica.agree(self._alone, contribution, False)
        self._samples += contribution.batch

    def _agree(self, finished: bool) -> Agreement:
        refused = bool(self._culprit)
        if not self._on_host:
            refused = bool(self._replica.take_refused(everything=True))
        return agree(self._communicator, Contribution(self._samples, not refused, finished))

    def _merge_node(self) -> None:
        self._replica.pull()
        self._replica.parameters.read_posterior(self._now)
        self._count(self._node.merge(self._now))

    def _send(self, sender: int) -> None:
        """Begin to add up the changes of all nodes since the common posterior."""
        common, node = self._common, self._node.gaussians
        self._replica.parameters.change_since(node, common.gaussians, self._sent)
        self._sender = sender
        if self._levels.node.rank == sender:
            common.change[:] = self._sent
            self._sum = Sum(self._levels.inter_node, common.change)

    def _receive(self) -> None:
        """Wait for the changes of all nodes, and take them into both posteriors."""
        if self._sum is not None:
            self._sum.wait()
        assert self._sender is not None
        change, common = self._common.change, self._common.gaussians
        broadcast(self._levels.node, change, self._sender)
        self._sum = self._sender = None
        add = self._replica.parameters.add_change
        self._count(add(self._node.gaussians, common, change, self._sent))
        self._count(add(common, common, change))

    def _write(self) -> None:
        """Go on with the node's posterior."""
        self._replica.parameters.write_posterior(self._node.gaussians)
        self._replica.updated()

    def _average(self, total: int) -> None:
        """Average the running statistics, weighted by the ranks' samples, ``total`` of all."""
        if self._on_host:
            super().average_statistics(self._samples, total)
        elif self._communicator.size > 1 and self._statistics.size:
            values = self._replica.statistics.packed(self._samples)
            Sum(self._communicator, values).wait()
            self._replica.statistics.unpack(values, total)

    def _count(self, guarded: list[int]) -> None:
        self.guarded = [sum(pair) for pair in zip(self.guarded, guarded, strict=True)]


class ScheduledMerging(Merging):
    """Merges the ranks of a node often, and nodes seldom and without waiting, by a schedule."""

    def __init__(
        self,
        communicator: Communicator,
        replica: Any,
        node_size: int | None,
        schedule: SyncSchedule,
    ) -> None:
        """Begin with replicas that are equal."""
        super().__init__(communicator, replica, node_size)
        self._schedule = schedule
        self._batch = self._batches = 0  # of this epoch

    def begin_epoch(self, batches: int) -> None:
        """Tell the number of batches of the epoch that begins, the same on all ranks."""
        if self._batches:
            raise RuntimeError("begin_epoch() needs an end_epoch() after the epoch before")
        self._batches = integer("batches", batches, 1)

    def end_epoch(self, loss: float) -> tuple[float, Agreement]:
        """Merge what is left, tell the schedule the mean of the ranks' losses, and return both."""
        loss = real("loss", loss)
        agreement = self.merge() if self.steps else _GO_ON
        mean = sum(all_gather_object(self._communicator, loss)) / self._communicator.size
        self._schedule.end_epoch(mean)
        self._batch = self._batches = 0
        return mean, agreement

    def __call__(self, parameters: Any, contribution: Contribution, average: bool) -> Agreement:
        """Step alone, and do what the schedule says."""
        if contribution.finished:
            raise RuntimeError(
                "join() is not for a schedule, by which all ranks make equally many steps: give a "
                "rank without data empty shares"
            )
        if self._batch == self._batches:
            raise RuntimeError(
                f"step number {self._batch} of this epoch, of {self._batches}: a schedule needs "
                "begin_epoch(batches) before an epoch, and end_epoch(loss) after it"
            )
        self._step(parameters, contribution)
        sync = self._schedule.after(self._batch, self._batches)
        self._batch += 1
        if sync.blocking:
            return self.merge()
        if sync.local:
            self._merge_node()
            if sync.merge and self._sender is not None:  # not if merge() was called meanwhile
                self._receive()
            if sync.send is not None and self._levels.nodes > 1:
                self._send(sync.send % self._levels.node.size)
            self._write()
        return _GO_ON


class Consensus:
    """The posterior of all that the ranks of a group have told each other; equal on all of them."""

    def __init__(self, communicator: Communicator, replica: Any) -> None:
        """Begin with the present state, which is the same on all ranks."""
        self._communicator = communicator
        self._replica = replica
        self.gaussians = replica.zeros()
        on_host = isinstance(replica.parameters, Parameters)
        #: room for a change, in the communicator's memory if it has any
        self.change = make_bucket(communicator, replica.parameters) if on_host else replica.zeros()
        self.begin()

    def begin(self) -> None:
        """Begin anew with the present state."""
        self._replica.parameters.read_posterior(self.gaussians)

    def merge(self, now: Any) -> list[int]:
        """Take in what each rank has learned, which has led it ``now`` to another posterior.

        Returns how many parameters of each layer took only a part of it.
        """
        parameters = self._replica.parameters
        if self._communicator.size == 1:
            self.gaussians[:] = now
            return [0] * len(self._replica.layers)
        parameters.change_since(now, self.gaussians, self.change)
        Sum(self._communicator, self.change).wait()
        guarded: list[int] = parameters.add_change(self.gaussians, self.gaussians, self.change)
        return guarded


class Sum:
    """A sum over the ranks of a group, in place, under way."""

    def __init__(self, communicator: Communicator, buffer: Any) -> None:
        """Begin."""
        self._buffer = buffer
        self._staged = _to_host(communicator, buffer)
        self._work = communicator.all_reduce(self._staged, async_op=True)

    def wait(self) -> None:
        """Return when the sum is in the buffer."""
        assert self._work is not None
        self._work.wait()
        if self._staged is not self._buffer:
            self._buffer.copy_(self._staged)


def broadcast(communicator: Communicator, buffer: Any, root: int) -> None:
    """Copy the buffer of rank ``root`` to all."""
    staged = _to_host(communicator, buffer)
    communicator.broadcast(staged, root)
    if staged is not buffer:
        buffer.copy_(staged)


def _to_host(communicator: Communicator, buffer: Any) -> Any:
    """Return the buffer, or, if the communicator's buffers are on the host, a copy there."""
    on_device = getattr(buffer, "is_cuda", False) and communicator.device == "cpu"
    return buffer.cpu() if on_device else buffer
