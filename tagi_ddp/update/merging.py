"""Replicas that step alone and merge their posteriors: information adds.

What a rank has learned since all were equal is a change of precisions and weighted means; the sum
of the ranks' changes is what all have learned together (cpp_backend/update/merge.h), but where they
have learned alike (adaptive_sum.h). So no sample counts twice, however many steps lie between two
merges, and whenever a change arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from tagi_ddp._backend import Agreement, Contribution
from tagi_ddp.checks import integer, real
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.levels import Levels
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.replica.staging import as_array, fill
from tagi_ddp.trace.timeline import traced
from tagi_ddp.update.compressed_sum import BITS, Compress, Finishing, Pending
from tagi_ddp.update.consensus import Consensus
from tagi_ddp.update.exchange import Exchange, Setting, vote
from tagi_ddp.update.not_finite import NotFiniteError, refusal

Reduction = Literal["mean", "sum", "precision"]
_REDUCTIONS = ("mean", "sum", "precision")
Rule = Literal["agreement", "bayes"]
_RULES = ("agreement", "bayes")
# A network that knows little moves far, and replicas of it lose touch: at first they merge after so
# many steps, and later let no more than such a part of all steps lie between two merges.
_OFTEN, _PART = 8, 8
_COUNTERS = ("steps", "guarded", "_samples", "_shares", "_all_shares", "_culprit")


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


@dataclass(frozen=True)
class Scheme:
    """How posteriors are merged; see `DDPSequential`."""

    node_size: int | None
    rule: Rule
    compress: Compress | None


def make_scheme(
    reduction: Reduction,
    node_size: int | None,
    rule: Rule | None,
    compress: Compress | None,
) -> Scheme:
    """Return how posteriors are merged; raise ValueError that names the argument."""
    for name, value, known in (("merge", rule, _RULES), ("compress", compress, BITS)):
        if value is not None and value not in known:
            options = ", ".join(f'"{option}"' for option in known)
            raise ValueError(f"{name} must be {options} or None, got {value!r}")
        if value is not None and reduction != "precision":
            raise ValueError(
                f'{name} is for reduction="precision", got {value!r} with {reduction!r}, whose '
                "sums are exact"
            )
    return Scheme(node_size, rule or "agreement", compress)


def make_merging(setting: Setting, scheme: Scheme, sync_every: int | SyncSchedule) -> Merging:
    """Return what merges the replicas every so many steps, or when a schedule says so."""
    if isinstance(sync_every, SyncSchedule):
        return ScheduledMerging(setting, scheme, sync_every)
    return Merging(setting, scheme, integer("sync_every", sync_every, 1))


class Merging(Exchange):
    """Merges the replicas of all ranks after every ``every`` steps.

    There are three posteriors: this rank's own; its node's; and the one that all nodes have in
    common. Each is the next one, times what has been learned since it was told. What a node has
    learned is sent by one of its ranks; when all nodes' changes have arrived they go into the
    common posterior, and into the node's, which has its own change already.

    ``guarded`` counts by layer the parameters that have taken only a part of a merge so far.
    """

    def __init__(self, setting: Setting, scheme: Scheme, every: int = 1) -> None:
        super().__init__(setting)
        replica, adaptive = setting.replica, scheme.rule == "agreement"
        self._every = every
        self._levels_of_world = Levels(setting.communicator, scheme.node_size)
        self._now = replica.zeros()
        # Bits are worth saving between nodes; within the only one, too, if that is asked for.
        within = None if self._levels_of_world.nodes > 1 else scheme.compress
        self._node = Consensus(self._levels_of_world.node, replica, adaptive, within)
        self._levels = [self._node]
        if self._levels_of_world.nodes > 1:
            self._common = Consensus(
                self._levels_of_world.inter_node, replica, adaptive, scheme.compress
            )
            self._levels.append(self._common)
            self._sent = replica.zeros()  # this node's change that is in flight
        self._sum: Pending | None = None  # of all nodes' changes, on the ranks that send them
        self._sender: int | None = None  # their node rank; None: nothing is in flight
        self._samples = self._shares = 0  # since the last merge of all
        self._all_shares, self._warms_up = 0, adaptive
        self._alone_of = setting.communicator.size if adaptive else 1  # see `step_alone`
        self._local = False  # whether steps are parts of one share
        self._culprit = ""  # the layer that made a step since then be refused
        self.steps = 0
        self.guarded = [0] * len(replica.layers)

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Step alone, and merge if it is time to."""
        self._step(samples, finished)
        return not self._local and self.end_share(finished)

    def end_share(self, finished: bool = False) -> bool:
        """Count a share of a batch, learned in one step or several, and merge if it is time to."""
        self._shares += not finished
        self._all_shares += not finished
        limit = self._every
        if self._warms_up:
            limit = min(limit, max(_OFTEN, self._all_shares // _PART))
        return (finished or self._shares >= limit) and self.merge(finished)

    @contextmanager
    def local_steps(self) -> Iterator[None]:
        """Let all steps of the block be those of one share."""
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def merge(self, finished: bool = False) -> bool:
        """Merge what all ranks have learned, and what is in flight; a collective call.

        Tells whether all ranks have finished. Raises NotFiniteError if a step since the last merge
        was refused: all others have been merged.
        """
        agreement, culprit = self._vote(finished), self._culprit
        if agreement.batch:
            self._replica.average_statistics(self._communicator, self._samples, agreement.batch)
        self._merge_node()
        if self._sender is not None:
            self._receive()
        if self._levels_of_world.nodes > 1:
            self._send(0)
            self._receive()
            self._node.gaussians[:] = self._common.gaussians  # up to rounding it is
        self._write()
        self._begin()
        if ranks := agreement.not_finite:
            raise NotFiniteError(refusal("steps since the last merge were", ranks, culprit), ranks)
        return agreement.all_finished

    @property
    def agreement(self) -> list[float]:
        """By layer, how much alike nodes, or the ranks of the only one, had learned before."""
        return (self._common if self._levels_of_world.nodes > 1 else self._node).agreement

    def take_refused(self, everything: bool) -> list[int]:
        """Return nothing: ranks step alone, and tell each other at the next merge."""
        return []

    def state_dict(self) -> dict[str, Any]:
        if self._local:
            raise RuntimeError("end local_batches() before: it is for between shares")
        nodes = None
        if self._levels_of_world.nodes > 1:
            if self._sum is not None:
                with self._between_nodes():
                    self._sum.wait()
                self._sum = Finishing(lambda: None)
            nodes = {
                "common": self._common.state_dict(),
                "sent": as_array(self._sent),
                "sender": self._sender,
                "sum": None if self._sum is None else as_array(self._common.bucket),
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
            fill(self._sent, nodes["sent"])
            self._sender = nodes["sender"]
            if nodes["sum"] is not None:
                fill(self._common.bucket, nodes["sum"])
                self._sum = Finishing(lambda: None)

    def take_counters(self, state: dict[str, Any]) -> None:
        """Let the ranks merge when those would have merged whose `state_dict` this is."""
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])

    def go_on(self, state: dict[str, Any]) -> None:
        """Do the same, all of whose ranks have been merged; all ranks are equal now."""
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
        """Apply this rank's own deltas, capped; not if they are not finite."""
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

    def _vote(self, finished: bool) -> Agreement:
        refused = bool(self._culprit or self._replica.take_refused(everything=True))
        return vote(self._communicator, Contribution(self._samples, not refused, finished))

    @traced("merging")
    def _merge_node(self) -> None:
        self._replica.pull()
        self._replica.parameters.read_posterior(self._now)
        with self._levels_of_world.naming(self._levels_of_world.node):
            self._count(self._node.merge(self._now))

    def _between_nodes(self) -> AbstractContextManager[None]:
        return self._levels_of_world.naming(self._levels_of_world.inter_node)

    def _send(self, sender: int) -> None:
        """Begin to add up the changes of all nodes since the common posterior."""
        common, node = self._common, self._node.gaussians
        self._replica.parameters.change_since(node, common.gaussians, self._sent)
        self._sender = sender
        if self._levels_of_world.node.rank == sender:
            common.change[:] = self._sent
            with self._between_nodes():
                self._sum = common.start()
        common.steps = 0

    @traced("merging nodes")
    def _receive(self) -> None:
        """Wait for the changes of all nodes, and take them into both posteriors."""
        if self._sum is not None:
            with self._between_nodes():
                self._sum.wait()
        assert self._sender is not None
        common, add = self._common, self._replica.parameters.add_change
        with self._levels_of_world.naming(self._levels_of_world.node):
            common.share(self._levels_of_world.node, self._sender)
        self._sum = self._sender = None
        common.agree()
        self._count(add(self._node.gaussians, common.gaussians, common.change, self._sent))
        self._count(add(common.gaussians, common.gaussians, common.change))

    def _write(self) -> None:
        """Go on with the node's posterior."""
        self._replica.parameters.write_posterior(self._node.gaussians)
        self._replica.updated()

    def _count(self, guarded: list[int]) -> None:
        self.guarded = [sum(pair) for pair in zip(self.guarded, guarded, strict=True)]


class ScheduledMerging(Merging):
    """Merges the ranks of a node often, and nodes seldom and without waiting, by a schedule."""

    def __init__(self, setting: Setting, scheme: Scheme, schedule: SyncSchedule) -> None:
        super().__init__(setting, scheme)
        self._schedule = schedule
        self._batch = self._batches = 0  # of this epoch

    def state_dict(self) -> dict[str, Any]:
        epoch = {"batch": self._batch, "batches": self._batches}
        return {**super().state_dict(), "schedule": self._schedule.state_dict(), "epoch": epoch}

    def take_counters(self, state: dict[str, Any]) -> None:
        super().take_counters(state)
        if "schedule" in state:  # else this one begins with its first epoch
            self._schedule.load_state_dict(state["schedule"])
            self._batch, self._batches = state["epoch"]["batch"], state["epoch"]["batches"]

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

    def end_share(self, finished: bool = False) -> bool:
        """Do what the schedule says after a share of a batch."""
        if finished:
            raise RuntimeError(
                "join() is not for a schedule, by which all ranks make equally many steps: give a "
                "rank without data empty shares"
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
            if sync.merge and self._sender is not None:  # not if merge() was called meanwhile
                self._receive()
            if sync.send is not None and self._levels_of_world.nodes > 1:
                self._send(sync.send % self._levels_of_world.node.size)
            self._write()
        return False
