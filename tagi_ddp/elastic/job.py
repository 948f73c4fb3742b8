"""DDPSequential in an elastic job, and the catch-up of a rank that enters a group."""

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
from tagi_ddp.communicators.config import DDPConfig
from tagi_ddp.communicators.equality import Entry, require_equal
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.compute.local_network import LocalNetwork
from tagi_ddp.data import DistributedSampler
from tagi_ddp.elastic.exchange import ElasticExchange, ElasticMerging, ElasticSum, NextGroup
from tagi_ddp.elastic.messages import Assignment, JoinRequest
from tagi_ddp.elastic.position import Position
from tagi_ddp.elastic.rendezvous import Rendezvous
from tagi_ddp.replica.equality import check_state, refuse_others
from tagi_ddp.update.exchange import Setting
from tagi_ddp.update.ranks import Ranks
from tagi_ddp.update.reduction import Reduction

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


class ElasticJob:
    """The part of `DDPSequential` for a job whose ranks may be lost and which ranks may join.

    Args:
        local: this rank's network.
        ranks: the ranks of the present group; first this one alone.
        reduction: how replicas become one.
        options: must be the same on all ranks.
        rendezvous: joins groups.
        config: of the first group.
        shares_cores: threads follow the number of ranks.
        merge: merges the posteriors of all ranks.
    """

    def __init__(
        self,
        local: LocalNetwork,
        ranks: Ranks,
        reduction: Reduction,
        options: dict[str, Any],
        rendezvous: Rendezvous,
        config: DDPConfig,
        shares_cores: bool,
        merge: Callable[[], None],
    ) -> None:
        """Enter the first group; a collective call."""
        self._local, self._ranks = local, ranks
        self._options = options
        self._rendezvous = rendezvous
        self._shares_cores = shares_cores
        self._merge = merge
        self._began = False  # True if this rank has a state that others may take
        self._entered = False  # True if it has been a rank of a group
        self._position = Position()
        self.config = config
        self.changes: list[GroupChange] = []
        setting = Setting(ranks.communicator, local.replica, reduction.average, local.rollback)
        ranks.exchange = exchange = (
            ElasticMerging(setting, reduction, rendezvous)
            if reduction.merges
            else ElasticSum(setting, rendezvous)
        )
        self._exchange: ElasticExchange = exchange
        self._import_early()
        self._regroup((), time.monotonic())

    @property
    def steps_made(self) -> int:
        """The number of steps of all ranks."""
        return self._exchange.steps_made

    @property
    def joined(self) -> bool:
        """True if this rank joined a job that others had begun."""
        return bool(self.changes) and self.changes[0].joined

    def steps(
        self, sampler: DistributedSampler, global_batch_size: int, epochs: int, first: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield (step, share) as `DDPSequential.steps` says."""
        exchange = self._exchange
        if not self.joined:
            exchange.steps_made = max(exchange.steps_made, integer("first", first, 0))
        sampler.begin(global_batch_size)
        plan = [*sampler.description, ("epochs", str(epochs))]
        if self._position.plan is None:
            self.survive(partial(self._agree_on_steps, plan))
        if self._position.plan is not None:
            self._position.follow(plan)
        self._position.plan, exchange.between_steps = plan, True
        try:
            while True:
                yield from self._turns(sampler, global_batch_size, epochs)
                if exchange.steps:
                    self._merge()
                elif self._end():
                    return
        finally:
            self._position.plan, exchange.between_steps = None, False

    def _agree_on_steps(self, plan: list[Entry]) -> None:
        """Raise RanksDiffer, on all ranks, unless they make the same steps."""
        made = [("the number of the first step", str(self.steps_made))]
        remedy = "Give all ranks the same data and arguments."
        require_equal(self._ranks.communicator, lambda: plan + made, "steps()", remedy)

    def _turns(
        self, sampler: DistributedSampler, global_batch_size: int, epochs: int
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        exchange, drawn = self._exchange, None
        while drawn is not self._ranks.communicator:
            if exchange.awaited:
                self._regroup((), time.monotonic())
            drawn = self._ranks.communicator
            sampler.rank, sampler.num_replicas = drawn.rank, drawn.size
            for step, share in sampler.steps(global_batch_size, epochs, self.steps_made):
                if drawn is not self._ranks.communicator:  # It has changed in `after_step`.
                    break
                self._position.aligned = True  # All ranks begin the same turn.
                yield step, share
                if drawn is not self._ranks.communicator:
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
        """Make a group of the remaining ranks."""
        self._regroup(lost, time.monotonic(), admits=False)

    def survive(self, call: Callable[[], T], changes: bool = False) -> T | None:
        """Make a collective call as `DDPSequential.survive` says."""
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
        """Return whether the ranks save after ``step`` steps; see `DDPSequential.saves`."""
        position, made = self._position, self.steps_made
        if position.aligned and position.steps is not None and step != made:
            raise ValueError(f"step is {step}, but {made} steps have been made: give that number")
        return position.aligned

    # --- for DDPSequential --------------------------------------------------------------------

    def together(self, exchange: Callable[[], object]) -> None:
        """Exchange with the other ranks; enter a new group if one is lost, or waits to join."""
        try:
            exchange()
            return
        except (NextGroup, PeerLost, Timeout) as error:
            began, reason = time.monotonic(), error
        self._ranks.give_up(reason)
        lost = reason.ranks if isinstance(reason, CommunicatorError) else ()
        self._regroup(lost, began, admits=not self._exchange.between_steps)

    def step(self, samples: int) -> None:
        """Make a step with the other ranks, or enter a new group; see `Exchange`."""
        self._position.begin_step(self.steps_made)
        self.together(partial(self._ranks.exchange, samples))

    def _import_early(self) -> None:
        """Import slow modules that may be needed, before others wait for this rank."""
        with contextlib.suppress(ImportError):
            if self._rendezvous.may_use_gloo:
                pass
            self._local.computes.import_early(_LARGE)

    def _regroup(self, blamed: Sequence[int], began: float, admits: bool = True) -> None:
        self._local.undo()
        while True:
            self._leave()
            joined = self._rendezvous.join(JoinRequest(self._progress, blamed, admits=admits))
            if joined is None:
                raise PeerLost("this elastic job has ended: there is no other group", blamed)
            try:
                self._enter(*joined, began)
                return
            except (PeerLost, Timeout) as error:
                blamed = error.ranks

    def _end(self) -> bool:
        """Return whether all ranks are done; if not, this one has entered a new group."""
        began = time.monotonic()
        joined = self._rendezvous.join(JoinRequest(self._progress, done=True))
        if joined is None:
            self._position.aligned = True
            return True
        self._leave()
        try:
            self._enter(*joined, began)
        except (PeerLost, Timeout) as error:
            self._regroup(error.ranks, began)
        return False

    @property
    def _progress(self) -> int | None:
        return self._exchange.progress if self._began else None

    def _leave(self) -> None:
        self._ranks.exchange.close()
        self._ranks.communicator.close()

    def _enter(self, communicator: Communicator, assignment: Assignment, began: float) -> None:
        """Enter a group, and catch up with its source; a collective call."""
        rank, size, source = assignment.rank, assignment.size, assignment.source
        known, new = self._began, not self._entered
        joins = new and (known or rank in assignment.behind)
        behind = rank in assignment.behind or (not known and rank != source)
        self._ranks.communicator = communicator
        ids, backend, timeout = self.config.device_ids, self.config.backend, self.config.timeout
        self.config = DDPConfig(ids, backend, 0, size, timeout)
        self.config.rank = rank
        topology_of(communicator)  # All ranks make this collective call here.
        refused = refuse_others(communicator, self._local.replica, self._options, known, source)
        if refused:
            raise PeerLost(f"ranks {refused} have another network", refused)
        exchange = self._exchange
        exchange.enter(communicator)
        self._began = known and not behind
        exchange.take_over(source, behind)
        returned = self._entered and rank >= assignment.stayed
        self._position.compare(communicator, assignment.stayed, returned, exchange.steps_made)
        self._take_lasting(exchange, source)
        # In the first group no rank has a state that others may copy before all is complete.
        self._began = known or rank in assignment.behind
        exchange.make_equal()
        self._local.replica.pull()
        state = check_state(communicator, self._local.replica)
        if any(
            len(part) for parts in self._local.compute.get_lstm_states().values() for part in parts
        ):
            self._local.compute.reset_lstm_states()  # Other ranks have these series now.
        if self._shares_cores:
            self._local.computes.set_threads(topology_of(communicator).share_of_cores(rank))
        self._began = self._entered = True
        if joins or not new:
            self.changes.append(
                GroupChange(
                    assignment.number,
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
        memory = self._local.compute.memory()
        if memory.lasting:
            lasting = exchange.take_lasting(source, memory.lasting)
            self._local.compute.remember(replace(memory, lasting=lasting))
