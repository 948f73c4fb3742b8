"""Replicas that step alone and merge their posteriors: information adds.

The change of a rank is one of precisions and weighted means, since all ranks were equal. The sum of
all ranks' changes is what they have learned together (cpp_backend/update/merge.h), except in what
they have learned alike (adaptive_sum.h). So no sample counts twice, however many steps lie between
two merges, and whenever a change arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from tagi_ddp._backend import Agreement, Contribution
from tagi_ddp.checks import integer, real
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.levels import Levels
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.trace.timeline import traced
from tagi_ddp.update.compressed_sum import Finishing, Pending
from tagi_ddp.update.consensus import Consensus
from tagi_ddp.update.exchange import Exchange, Setting
from tagi_ddp.update.not_finite import NotFiniteError, refusal
from tagi_ddp.update.reduction import Reduction

# An untrained network moves far, and its replicas drift apart: at first they merge after 8 steps,
# and later after at most an eighth of all steps so far.
_FIRST_STEPS, _DIVISOR = 8, 8
_COUNTERS = ("steps", "guarded", "_samples", "_shares", "_all_shares", "_culprit")


def make_merging(
    setting: Setting, reduction: Reduction, compare: Callable[[], None] | None
) -> Merging:
    """Return an exchange that merges every ``sync_every`` steps, or by a schedule.

    ``compare`` is a collective call before the first merge of all ranks.
    """
    every = reduction.sync_every
    merging = (
        ScheduledMerging(setting, reduction, every)
        if isinstance(every, SyncSchedule)
        else Merging(setting, reduction, every)
    )
    merging.compare = compare
    return merging


class Merging(Exchange):
    """Merges of the replicas of all ranks, after every ``every`` steps.

    There are three posteriors: this rank's own; its node's; and the common one of all nodes. Each
    equals the next one multiplied by the evidence gathered since the two were last synchronised.
    One rank of a node sends the node's change. When the changes of all nodes have arrived, they are
    merged into the common posterior, and into the node's, which has its own change already.

    ``guarded`` counts by layer the parameters that have taken only a part of a merge so far.
    """

    compare: Callable[[], None] | None = None
    """A collective call before the first merge of all ranks."""

    def __init__(self, setting: Setting, reduction: Reduction, every: int = 1) -> None:
        super().__init__(setting)
        replica, adaptive = setting.replica, reduction.adaptive
        self._every = every
        self._levels_of_world = Levels(setting.communicator, reduction.node_size)
        size = replica.parameters.size
        self._now = np.zeros(2 * size, np.float32)
        # Changes are compressed between nodes; within a node only if there is no other.
        within = None if self._levels_of_world.nodes > 1 else reduction.compress
        self._node = Consensus(self._levels_of_world.node, replica, adaptive, within)
        self._levels = [self._node]
        if self._levels_of_world.nodes > 1:
            self._common = Consensus(
                self._levels_of_world.inter_node, replica, adaptive, reduction.compress
            )
            self._levels.append(self._common)
            self._sent = np.zeros(2 * size, np.float32)  # the change of this node that is in flight
        self._sum: Pending | None = None  # of all nodes' changes, on the ranks that send them
        self._sender: int | None = None  # their node rank; None: nothing is in flight
        self._samples = self._shares = 0  # since the last merge of all
        self._all_shares, self._warms_up = 0, adaptive
        self._alone_of = setting.communicator.size if adaptive else 1  # see `step_alone`
        self._local = False  # True if steps are parts of one share
        self._culprit = ""  # the layer at fault for a step refused since then
        self.steps = 0
        self.guarded = [0] * len(replica.layers)

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Step alone, and merge if a merge is due."""
        self._step(samples, finished)
        return not self._local and self.end_share(finished)

    def end_share(self, finished: bool = False) -> bool:
        """Count a share of a batch, of one step or several, and merge if a merge is due."""
        self._shares += not finished
        self._all_shares += not finished
        limit = self._every
        if self._warms_up:
            limit = min(limit, max(_FIRST_STEPS, self._all_shares // _DIVISOR))
        return (finished or self._shares >= limit) and self.merge(finished)

    @contextmanager
    def local_steps(self) -> Iterator[None]:
        """Treat all steps of the block as those of one share."""
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def merge(self, finished: bool = False) -> bool:
        """Merge the changes of all ranks, and those in flight; a collective call.

        Returns whether all ranks have finished. Raises NotFiniteError if a step since the last
        merge was refused: all others have been merged.
        """
        if self.compare is not None:
            self.compare()
            self.compare = None
        agreement, culprit = self._agree(finished), self._culprit
        if agreement.batch:
            self._replica.average_statistics(self._communicator, self._samples, agreement.batch)
        self._merge_node()
        if self._sender is not None:
            self._receive()
        if self._levels_of_world.nodes > 1:
            self._send(0)
            self._receive()
            self._node.gaussians[:] = self._common.gaussians  # They differ by rounding.
        self._write()
        self._begin()
        if ranks := agreement.not_finite:
            raise NotFiniteError(refusal("steps since the last merge were", ranks, culprit), ranks)
        return agreement.all_finished

    @property
    def agreement(self) -> list[float]:
        """The agreement by layer, 0 to 1, of nodes or the only node's ranks, at the last merge."""
        return (self._common if self._levels_of_world.nodes > 1 else self._node).agreement

    def take_refused(self, everything: bool) -> list[int]:
        """Return an empty list: ranks step alone, and report refused steps at the next merge."""
        return []

    def state_dict(self) -> dict[str, Any]:
        if self._local:
            raise RuntimeError("end local_batches() first: a state is saved between shares")
        nodes = None
        if self._levels_of_world.nodes > 1:
            if self._sum is not None:
                with self._between_nodes():
                    self._sum.wait()
                self._sum = Finishing(lambda: None)
            nodes = {
                "common": self._common.state_dict(),
                "sent": self._sent,
                "sender": self._sender,
                "sum": None if self._sum is None else self._common.bucket,
            }
        return {
            "node_number": self._levels_of_world.inter_node.rank,
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "node": self._node.state_dict(),
            "nodes": nodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restart()
        self.take_counters(state)
        self._node.load_state_dict(state["node"])
        if (nodes := state["nodes"]) is not None:
            self._common.load_state_dict(nodes["common"])
            self._sent[:] = nodes["sent"]
            self._sender = nodes["sender"]
            if nodes["sum"] is not None:
                self._common.bucket[:] = nodes["sum"]
                self._sum = Finishing(lambda: None)

    def take_counters(self, state: dict[str, Any]) -> None:
        """Restore the counters of a `state_dict`: the next merge is due when it was due there."""
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` of ranks that have been merged; all ranks are equal now."""
        self.take_counters(state)
        self._begin()

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._levels_of_world.nodes

    def restart(self) -> None:
        if self._sum is not None:
            self._sum.wait()
        self._sum = self._sender = None
        self._replica.pull()
        self._node.begin()
        if self._levels_of_world.nodes > 1:
            self._common.begin()
        self._begin()

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:
        self._levels_of_world.abort(reason, ranks)

    def close(self) -> None:
        """Close the levels."""
        self._levels_of_world.close()

    def _begin(self) -> None:
        self.steps = self._shares = self._samples = 0
        self._culprit = ""

    @traced("applying")
    def _step(self, samples: int, finished: bool) -> None:
        """Apply this rank's own deltas, capped, if they are finite."""
        self.steps += not finished
        for level in self._levels:
            level.steps += not finished
        outcome = self._replica.step_alone(samples, self._alone_of)
        if not isinstance(outcome, str):
            self._rollback.restore_if(outcome.refused)
        elif outcome:
            self._rollback.restore()
            self._culprit = self._culprit or outcome
            return
        self._rollback.drop()
        self._samples += samples

    def _agree(self, finished: bool) -> Agreement:
        refused = bool(self._culprit or self._replica.take_refused(everything=True))
        return self._vote(Contribution(self._samples, not refused, finished))

    @traced("merging")
    def _merge_node(self) -> None:
        self._replica.pull()
        self._replica.parameters.read_posterior(self._now)
        with self._levels_of_world.naming(self._levels_of_world.node):
            self._count(self._node.merge(self._now))

    def _between_nodes(self) -> AbstractContextManager[None]:
        return self._levels_of_world.naming(self._levels_of_world.inter_node)

    def _send(self, sender: int) -> None:
        """Start to sum the changes of all nodes since the common posterior."""
        common, node = self._common, self._node.gaussians
        self._replica.on_host.change_since(node, common.gaussians, self._sent)
        self._sender = sender
        if self._levels_of_world.node.rank == sender:
            common.change[:] = self._sent
            with self._between_nodes():
                self._sum = common.start()
        common.steps = 0

    @traced("merging nodes")
    def _receive(self) -> None:
        """Wait for the changes of all nodes, and merge them into both posteriors."""
        if self._sum is not None:
            with self._between_nodes():
                self._sum.wait()
        assert self._sender is not None
        common, add = self._common, self._replica.on_host.add_change
        with self._levels_of_world.naming(self._levels_of_world.node):
            common.share(self._levels_of_world.node, self._sender)
        self._sum = self._sender = None
        common.agree()
        self._count(add(self._node.gaussians, common.gaussians, common.change, self._sent))
        self._count(add(common.gaussians, common.gaussians, common.change))

    def _write(self) -> None:
        """Write the node's posterior to the replica."""
        self._replica.parameters.write_posterior(self._node.gaussians)
        self._replica.updated()

    def _count(self, guarded: list[int]) -> None:
        self.guarded = [sum(pair) for pair in zip(self.guarded, guarded, strict=True)]


class ScheduledMerging(Merging):
    """Merges by a schedule: the ranks of a node often, nodes seldom and without waiting."""

    def __init__(self, setting: Setting, reduction: Reduction, schedule: SyncSchedule) -> None:
        super().__init__(setting, reduction)
        self._schedule = schedule
        self._batch = self._batches = 0  # of this epoch

    def state_dict(self) -> dict[str, Any]:
        epoch = {"batch": self._batch, "batches": self._batches}
        return {**super().state_dict(), "schedule": self._schedule.state_dict(), "epoch": epoch}

    def take_counters(self, state: dict[str, Any]) -> None:
        super().take_counters(state)
        if "schedule" in state:  # Otherwise it begins with its first epoch.
            self._schedule.load_state_dict(state["schedule"])
            self._batch, self._batches = state["epoch"]["batch"], state["epoch"]["batches"]

    def begin_epoch(self, batches: int) -> None:
        """Begin an epoch of ``batches`` batches, the same number on all ranks."""
        if self._batches:
            raise RuntimeError("begin_epoch() needs an end_epoch() after the epoch before")
        self._batches = integer("batches", batches, 1)

    def end_epoch(self, loss: float) -> float:
        """Merge the remaining steps, give the schedule the ranks' mean loss, and return it."""
        loss = real("loss", loss)
        problem: NotFiniteError | None = None
        try:
            if self.steps:
                self.merge()
        except NotFiniteError as error:  # All ranks raise it, and still end the epoch.
            problem = error
        mean: float = sum(all_gather_object(self._communicator, loss)) / self._communicator.size
        self._schedule.end_epoch(mean)
        self._batch = self._batches = 0
        if problem is not None:
            raise problem
        return mean

    def end_share(self, finished: bool = False) -> bool:
        """Synchronize as the schedule requires after a share of a batch."""
        if finished:
            raise RuntimeError(
                "join() is not for a schedule, by which all ranks make the same number of steps: "
                "give a rank without data empty shares"
            )
        if self._batch == self._batches:
            raise RuntimeError(
                f"batch number {self._batch} of this epoch, of {self._batches}: a schedule needs "
                "begin_epoch(batches) before an epoch, and end_epoch(loss) after it"
            )
        sync = self._schedule.after(self._batch, self._batches)
        self._batch += 1
        if sync.blocking:
            return self.merge()
        if sync.local:
            self._merge_node()
            if sync.merge and self._sender is not None:  # merge() may have received it.
                self._receive()
            if sync.send is not None and self._levels_of_world.nodes > 1:
                self._send(sync.send % self._levels_of_world.node.size)
            self._write()
        return False
