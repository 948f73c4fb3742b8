"""DDPSequential in an elastic job, whose ranks may be lost and which new ranks may join."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, CommunicatorError, PeerLost, Timeout
from tagi_ddp.communicators.equality import Entry, require_equal
from tagi_ddp.communicators.guard import CanAbort, report
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.compute.rollback import Rollback
from tagi_ddp.data import DistributedSampler
from tagi_ddp.sequential.config import DDPConfig
from tagi_ddp.sequential.equality import check_state, refuse_others
from tagi_ddp.sequential.interface import MergeInterface, SequentialInterface
from tagi_ddp.sequential.membership import Group, Membership
from tagi_ddp.sequential.position import Position
from tagi_ddp.update.elastic import ElasticExchange, ElasticMerging, ElasticSum, NextGroup
from tagi_ddp.update.exchange import Setting
from tagi_ddp.update.reduction import Kind, Reduction

_LARGE = 1 << 12  # more samples than a rank of a small network has in most steps

log = logging.getLogger("tagi_ddp")
T = TypeVar("T")


@dataclass(frozen=True)
class GroupChange:
    """A change of the group of ranks: some were lost or joined, and this rank is in the next group.

    Attributes:
        group: the number of the next group; the job begins with group 1.
        step: the number of steps made so far.
        rank: this rank's number in the next group.
        size: the number of ranks in the next group.
        hash: the hash of all parameters and running statistics, equal on all ranks.
        time: when the next group was ready, in seconds since 1970.
        seconds: the time from when this rank knew of the change until the next group was ready.
        joined: True if this rank is new.
    """

    group: int
    step: int
    rank: int
    size: int
    hash: str
    time: float
    seconds: float
    joined: bool


class ElasticInterface(MergeInterface, SequentialInterface):
    """The methods and properties of DDPSequential for ``elastic``."""

    communicator: Communicator
    config: DDPConfig
    reduction: Kind
    _reduction: Reduction
    changes: list[GroupChange]
    """The changes of the group so far, in an elastic job."""
    _options: dict[str, Any]
    _groups: Callable[[], Iterator[CanAbort]]
    _rollback: Rollback
    _undo: Callable[[], None]
    _membership: Membership | None = None
    _shares_cores = False  # True if threads follow the number of ranks
    _began = False  # True if this rank has a state that others may copy
    _entered = False  # True if it has been a rank of a group
    _position: Position

    @property
    def elastic(self) -> bool:
        """True if the job continues when ranks are lost."""
        return self._membership is not None

    @property
    def steps_made(self) -> int:
        """The number of steps of all ranks in an elastic job; also the number of the next step."""
        return self._elastic("steps_made").steps_made

    @property
    def joined(self) -> bool:
        """True if this rank joined an elastic job that others had begun."""
        return bool(self.changes) and self.changes[0].joined

    def steps(
        self, sampler: DistributedSampler, global_batch_size: int, epochs: int, first: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield (step, share) for each step of an elastic job, as `DistributedSampler.steps` does.

        ``for step, share in model.steps(sampler, 256, epochs=10):`` call `step`, or `learn`, once
        on the share. If a rank is lost before a step is made, the step is repeated with shares of
        other sizes. A rank that joins begins at the step of the others. The loop ends when all
        ranks have ended theirs, with their posteriors merged.

        Args:
            sampler: the same on all ranks; its rank and number of replicas follow the group's.
            global_batch_size, epochs, first: as for `DistributedSampler.steps`.

        Raises:
            RuntimeError: the model is not elastic, or a turn of the loop made no step, or several.
        """
        exchange = self._elastic("steps")
        if not self.joined:
            exchange.steps_made = max(exchange.steps_made, integer("first", first, 0))
        settings = {**sampler.settings, "global_batch_size": global_batch_size, "epochs": epochs}
        plan = [(name, str(value)) for name, value in settings.items()]
        if self._position.plan is None:
            self.survive(partial(self._agree_on_steps, plan))
        if self._position.plan is not None:
            self._position.follow(plan)
        self._position.plan, exchange.between_steps = plan, True
        try:
            while True:
                yield from self._turns(sampler, global_batch_size, epochs)
                if self.unmerged_steps:
                    self.merge()
                elif self._end():
                    return
        finally:
            self._position.plan, exchange.between_steps = None, False

    def _agree_on_steps(self, plan: list[Entry]) -> None:
        """Raise RanksDiffer, on all ranks, unless they make the same steps."""
        made = [("the number of the first step", str(self.steps_made))]
        remedy = "Give all ranks the same data and arguments."
        require_equal(self.communicator, lambda: plan + made, "steps()", remedy)

    def _turns(
        self, sampler: DistributedSampler, global_batch_size: int, epochs: int
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        exchange, drawn = self._elastic("steps"), None
        while drawn is not self.communicator:
            if exchange.awaited:
                self._regroup((), time.monotonic())
            drawn = self.communicator
            sampler.rank, sampler.num_replicas = drawn.rank, drawn.size
            for step, share in sampler.steps(global_batch_size, epochs, self.steps_made):
                self._position.aligned = True  # All ranks begin the same turn.
                yield step, share
                if drawn is not self.communicator:
                    break
                if self.steps_made != step + 1:
                    raise RuntimeError(
                        f"{self.steps_made - step} steps were made of step {step}: call step() or "
                        "learn() once for each share, an empty one, too"
                    )
                if exchange.awaited:
                    drawn = None
                    break

    def regroup(self, lost: Sequence[int] = ()) -> None:
        """Make a group of the remaining ranks; `step` of an elastic job does so by itself.

        It is for collective calls of the script's own: if one raises PeerLost or Timeout, call this
        with the error's ``ranks``. All remaining ranks must call this, or `step`. New ranks do not
        join here, because their scripts are elsewhere.
        """
        self._elastic("regroup")
        self._regroup(lost, time.monotonic(), admits=False)

    def survive(self, call: Callable[[], T], changes: bool = False) -> T | None:
        """Make a collective call; if a rank is lost meanwhile, repeat it in the next group.

        Args:
            call: calls operations of `communicator`, the same on all ranks.
            changes: True if it changes the network, so that others may not copy this rank's state
                before it returns.

        Returns:
            the result of ``call``; None, without the call, if the last step is repeated, or if
            other ranks are ahead: they have completed the call, or are after another step.

        Raises:
            RuntimeError: the model is not elastic.
            PeerLost: the job has ended.
        """
        self._elastic("survive")
        position = self._position
        while position.aligned:
            calls = position.calls
            self._began = self._began and not changes
            try:
                result = call()
                position.calls += 1
                return result
            except (PeerLost, Timeout) as error:
                self._regroup(error.ranks, time.monotonic(), admits=False)
            finally:
                self._began = True
            if position.calls > calls:
                break
        return None

    # --- for checkpoints ----------------------------------------------------------------------

    def saves(self, step: int) -> bool:
        """Return whether the ranks save after ``step`` steps; not if the last one is repeated.

        Raises ValueError if another number of steps has been made.
        """
        position, made = self._position, self.steps_made
        if position.aligned and position.steps is not None and step != made:
            raise ValueError(f"step is {step}, but {made} steps have been made: give that number")
        return position.aligned

    # --- for DDPSequential --------------------------------------------------------------------

    def _together(self, exchange: Callable[[], object]) -> None:
        """Exchange with the other ranks; enter a new group if one is lost, or waits to join."""
        try:
            exchange()
            return
        except (NextGroup, PeerLost, Timeout) as error:
            if self._membership is None:
                raise
            began, reason = time.monotonic(), error
        report(self._groups(), reason)
        lost = reason.ranks if isinstance(reason, CommunicatorError) else ()
        self._regroup(lost, began, admits=not self._elastic("step").between_steps)

    def _step_together(self, samples: int) -> None:
        """Make a step with the other ranks, or enter a new group; see `Exchange`."""
        self._position.begin_step(self.steps_made)
        self._together(partial(self._exchange, samples))

    def _begin_elastic(self) -> None:
        """Enter the first group."""
        membership = self._membership
        assert membership is not None

        setting = Setting(
            self.communicator, self._replica, self.reduction == "mean", self._rollback
        )
        self._exchange = (
            ElasticMerging(setting, self._reduction, membership)
            if self.reduction == "precision"
            else ElasticSum(setting, membership)
        )
        self.changes = []
        self._position = Position()
        self._import_early(membership)
        self._regroup((), time.monotonic())

    def _import_early(self, membership: Membership) -> None:
        """Import slow modules that may be needed, before others wait for this rank."""
        with contextlib.suppress(ImportError):
            if membership.may_use_gloo:
                import tagi_ddp.communicators.network.rendezvous
            if self._by_batch is not None and self._by_batch.may_need_torch(_LARGE):
                import tagi_ddp.compute.on_torch  # noqa: F401

    def _regroup(self, blamed: Sequence[int], began: float, admits: bool = True) -> None:
        membership = self._membership
        assert membership is not None
        self._undo()
        while True:
            self._leave()
            group = membership.join(self._progress, blamed, False, admits)
            if group is None:
                raise PeerLost("this elastic job has ended: there is no other group", blamed)
            try:
                self._enter(group, began)
                return
            except (PeerLost, Timeout) as error:
                blamed = error.ranks

    def _end(self) -> bool:
        """Return whether all ranks are done; if not, this one has entered a new group."""
        assert self._membership is not None
        began = time.monotonic()
        group = self._membership.join(self._progress, (), True, True)
        if group is None:
            self._position.aligned = True
            return True
        self._leave()
        try:
            self._enter(group, began)
        except (PeerLost, Timeout) as error:
            self._regroup(error.ranks, began)
        return False

    @property
    def _progress(self) -> int | None:
        return self._elastic("step").progress if self._began else None

    def _leave(self) -> None:
        self._exchange.close()
        self.communicator.close()

    def _enter(self, group: Group, began: float) -> None:
        """Enter a group; a collective call."""
        communicator = group.communicator
        rank, size = communicator.rank, communicator.size
        known, new = self._began, not self._entered
        joins = new and (known or rank in group.behind)
        behind = rank in group.behind or (not known and rank != group.source)
        self.communicator = communicator
        self.config = DDPConfig(self.config.device_ids, self.config.backend, 0, size)
        self.config.rank = rank
        topology_of(communicator)  # All ranks make this collective call here.
        refused = refuse_others(communicator, self._replica, self._options, known, group.source)
        if refused:
            raise PeerLost(f"ranks {refused} have another network", refused)
        exchange = self._elastic("step")
        exchange.enter(communicator)
        self._began = known and not behind
        exchange.take_over(group.source, behind)
        returned = self._entered and rank >= group.stayed
        self._position.compare(communicator, group.stayed, returned, exchange.steps_made)
        self._take_lasting(exchange, group.source)
        # In the first group no rank has a state that others may copy before all is complete.
        self._began = known or rank in group.behind
        exchange.make_equal()
        self._replica.pull()
        state = check_state(communicator, self._replica)
        if any(len(part) for parts in self.compute.get_lstm_states().values() for part in parts):
            self.compute.reset_lstm_states()  # Other ranks have these series now.
        if self._shares_cores:
            self.set_threads(topology_of(communicator).share_of_cores(rank))
        self._began = self._entered = True
        if joins or not new:
            self.changes.append(
                GroupChange(
                    group.number,
                    exchange.steps_made,
                    rank,
                    size,
                    state,
                    time.time(),
                    time.monotonic() - began,
                    joins,
                )
            )
            if rank == 0:
                log.warning("%d ranks go on at step %d", size, exchange.steps_made)

    def _take_lasting(self, exchange: ElasticExchange, source: int) -> None:
        """Restore this rank's part of the deltas that add up over steps."""
        memory = self.compute.memory()
        if memory.lasting:
            lasting = exchange.take_lasting(source, memory.lasting)
            self.compute.remember(replace(memory, lasting=lasting))

    def _elastic(self, name: str) -> ElasticExchange:
        if isinstance(self._exchange, ElasticExchange):
            return self._exchange
        raise RuntimeError(f"{name} needs DDPSequential(..., elastic=True)")
