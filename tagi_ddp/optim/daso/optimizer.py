"""DASO for torch: the ranks of a node train as one, and nodes exchange without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tagi_ddp.communicators import Communicator, CommunicatorError
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.communicators.guard import Closing, abort, or_abort
from tagi_ddp.communicators.levels import Levels
from tagi_ddp.optim.chunks import broadcast_in_place
from tagi_ddp.optim.daso.batches import Batches
from tagi_ddp.optim.daso.finite import average_loss
from tagi_ddp.optim.daso.node import Node, Tensors
from tagi_ddp.optim.daso.nodes import Nodes
from tagi_ddp.optim.daso.settings import Settings, adopt, check_same
from tagi_ddp.optim.daso.update import Update
from tagi_ddp.optim.models import all_params, compare_models
from tagi_ddp.optim.schedule import Skips, Stability, Sync

_SAME = "Give the same on all ranks."


class DASO(Settings, Closing):
    """Distributed asynchronous and selective optimization around an optimizer of torch.

    The ranks of a node average their gradients after most batches, and after every batch while an
    exchange between nodes is in flight. Nodes exchange their parameters after every batch of the
    first and the last epochs. In the epochs between they do so now and then, without waiting: see
    `SyncSchedule`. With one node this is data parallelism, after every batch.

    Making a DASO is a collective call; `step`, `epoch_loss_logic`, `set_model`, `reset` and
    `load_state_dict` are too. An epoch has ``last_batch`` batches, which must be set, and ends with
    `epoch_loss_logic`::

        daso = DASO(optimizer, total_epochs=20)
        net = DataParallelMultiGPU(model, daso)
        daso.last_batch = len(loader)
        for epoch in range(20):
            for x, y in loader:
                daso.zero_grad()
                loss = criterion(net(x), y)
                loss.backward()
                daso.step()
            daso.epoch_loss_logic(loss)

    All ranks begin with rank 0's parameters and buffers. Afterwards trainable parameters and
    floating-point buffers are averaged, other buffers are rank 0's, and frozen parameters are left
    alone; call `set_model` again after adding, freezing, unfreezing or moving any. The optimizer's
    own state is not exchanged. If numbers that nodes exchange are NaN or infinite, all ranks raise
    FloatingPointError after the same batch, and apply nothing of it.

    Args:
        local_optimizer: of this rank's model; not one that needs a closure.
        total_epochs: the number of epochs.
        comm: of all ranks: a communicator, which stays open, a torch.distributed.ProcessGroup or
            one of mpi4py; None: `init()`.
        warmup_epochs, cooldown_epochs: the numbers of epochs, at the beginning and at the end, in
            which all ranks average after every batch.
        scheduler: a learning rate scheduler of torch, which `step` steps once a batch, after the
            optimizer; None: there is none, or you step it.
        stability_level: a loss that improves on the best one by no more than this fraction of it
            is stable; after two such epochs nodes exchange more often.
        max_global_skips: the largest number of batches from one exchange between nodes to the next.
        sending_chunk_size: the largest number of elements of one operation.
        downcast_type: the dtype that nodes send: torch.bfloat16, torch.half or torch.float. Errors
            of casting are added to the next exchange; float64 is not cast.
        use_mpi_groups: accepted for compatibility; the communicator is split either way.
        skip_reduction_factor: the divisor of the skips when the loss is stable.
        local_skip_factor: how many times the ranks of a node synchronize for each exchange between
            nodes, at first.
        verbose: whether `print0` prints, on rank 0.
        node_size: the number of consecutive ranks of a node; None: see `Levels`.
        local_weight: when copies are merged S batches after nodes sent them, a node's parameters
            count as ``local_weight * S`` copies; 2 in the paper on DASO.

    Raises:
        TypeError, ValueError: naming the argument and what it got; all types are checked before
            any value.
    """

    comm: Communicator

    def __post_init__(self) -> None:
        """Check the arguments, split the ranks into nodes, and begin with rank 0's parameters."""
        self._closed = False
        self._sent = 0  # The batch after which copies were last sent.
        self._apart = False  # True once the ranks of a node have stepped alone.
        with ExitStack() as made:
            self.comm = adopt(self.comm, made)
            with all_or_none(self.comm, "the ranks' arguments", _SAME) as same:
                self.compare(same)
            self._levels = Levels(self.comm, self.node_size)
            made.callback(self._levels.close)
            self._made = made.pop_all()
        self._batches = Batches(self.comm, self._levels)
        self._schedule = self._new_schedule()
        self._update = Update(self.local_optimizer, self.scheduler)
        try:
            self._begin(nn.Module())
        except BaseException:
            self.close()
            raise

    def _begin(self, model: nn.Module) -> None:
        """Begin with the parameters of rank 0 on all ranks, if their models are the same."""
        with all_or_none(self.comm, "the ranks' models", _SAME) as same:
            compare_models(same, "model", model, {"local_optimizer": self.local_optimizer})
        levels, limit = self._levels, self.sending_chunk_size
        with self._or_abort():
            tensors = Tensors(model, self.local_optimizer)
            broadcast_in_place(tensors.all, self.comm, 0, limit)
            self._shapes = tensors.shapes
            self._node = Node(levels.node, tensors, limit)
            self._nodes: Nodes | None = None
            if levels.nodes > 1:
                floats, cast = [*tensors.parameters, *tensors.floats], self.downcast_type
                weight = self.local_weight
                self._nodes = Nodes(levels, floats, tensors.integers, cast, limit, weight)

    # --- settings and progress ----------------------------------------------------------------

    @property
    def loc_gpus(self) -> int:
        """The number of ranks of a node, each with its GPU if there are any."""
        return self._levels.node.size

    @property
    def params_ref(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return all_params(self.local_optimizer)

    @property
    def split(self) -> bool | None:
        """True if nodes need several operations to send; None: there is one node."""
        return None if self._nodes is None else bool(self._nodes.splits)

    @property
    def split_inds(self) -> list[int] | None:
        """The positions at which data for nodes is split into operations; None if it is not."""
        return self._nodes.splits if self._nodes is not None and self.split else None

    @property
    def stability(self) -> Stability:
        """The best loss, and the number of epochs without an improvement on it."""
        return self._schedule.stability

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._schedule.epoch

    @property
    def global_skip(self) -> int:
        """Batches from one exchange between nodes to the next; 0: one after each, all wait."""
        return self._skips.global_skip

    @property
    def local_skip(self) -> int:
        """Batches between synchronizations of a node's ranks, if no copies are in flight."""
        return self._skips.local_skip

    @property
    def batches_to_wait(self) -> int:
        """Batches after which sent copies are merged; 0: all ranks wait for them."""
        return self._skips.batches_to_wait

    @property
    def _skips(self) -> Skips:
        return self._schedule.skips if self._schedule.phase == "cycling" else Skips(0, 1, 0)

    @property
    def last_batch(self) -> int | None:
        """The number of batches of an epoch, the same on all ranks; None until it is set."""
        return self._batches.all

    @last_batch.setter
    def last_batch(self, batches: int | None) -> None:
        self._batches.count(batches)

    @property
    def amp(self) -> bool:
        """True if there is a gradient scaler."""
        return self._update.scaler is not None

    def print0(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, if ``verbose`` is set."""
        if self.verbose and self.comm.rank == 0:
            print(*args, **kwargs)

    # --- training -----------------------------------------------------------------------------

    def add_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Step the optimizer by ``scaler`` in `step`, and update the scaler.

        Ranks of a node that average their gradients unscale them first, and skip the step together.
        """
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r}")
        self._update.scaler = scaler

    def set_model(self, model: nn.Module) -> None:
        """Synchronize the buffers of ``model``, too, and parameters that the optimizer lacks.

        Parameters, frozen ones too, and buffers become those of rank 0. `DataParallelMultiGPU`
        calls this.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: on all ranks, if models differ in more than numbers.
        """
        with self._or_abort():
            self._drop()
        self._begin(model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the optimizer's parameters."""
        self.local_optimizer.zero_grad(set_to_none)
        self.progress()

    def progress(self) -> None:
        """Advance the exchange in flight between nodes, without waiting."""
        if self._nodes is not None and self._nodes.busy:
            with self._or_abort():
                self._nodes.progress()

    def step(self) -> None:
        """Step the optimizer, the scheduler and the scaler, then synchronize what is due.

        Raises:
            RuntimeError: ``last_batch`` is not set (a ValueError too), or all batches are done.
            ValueError: on all ranks, if they make different numbers of steps in an epoch.
            FloatingPointError: on all ranks, if numbers that they exchange are NaN or infinite.
        """
        with self._or_abort():
            if self._batches.done == 0:
                self._batches.begin()
            self._step(self._schedule.after(self._batches.next(), self._batches.known()))
        self._batches.done += 1

    @torch.no_grad()
    def _step(self, sync: Sync) -> None:
        if (number := self._batches.done + 1) == self._batches.all:
            self._end(number)
        if self._nodes is not None:
            self._nodes.progress()
        together = self._nodes is None or sync.local or sync.blocking
        if together:
            self._update.together(self._node, all_ranks=self._nodes is None)
            if self._apart:
                self._node.average_parameters()
        else:
            self._update.alone()
            # It stays True: states of optimizers, such as momentum, differ from now on.
            self._apart = self.loc_gpus > 1
        if self._nodes is None:
            return
        if sync.merge:
            self._nodes.merge(sync.merge)
        if sync.send is not None:
            self._nodes.send(sync.send % self.loc_gpus)
            self._sent = self._batches.done
        if sync.blocking:
            self._nodes.average()

    def epoch_loss_logic(
        self, loss: Tensor | int | float, loss_globally_averaged: bool = False
    ) -> None:
        """End the epoch, and choose the skips of the next one.

        If the epoch ends before its last batch, all ranks average first.

        Args:
            loss: of the epoch, on this rank.
            loss_globally_averaged: whether it is averaged over all ranks; else this averages it.

        Raises:
            TypeError, ValueError: ``loss`` is no number.
            FloatingPointError: on all ranks, if the averaged loss is NaN or infinite; it is a
                ValueError, too, like that of `step`.
        """
        with self._or_abort():
            if 0 < self._batches.done != self._batches.all:
                self._end(self._batches.done)
                self._synchronize_early()
            average = average_loss(self.comm, loss, loss_globally_averaged)
            self._schedule.end_epoch(average)
        self._batches.done = 0
        self.print0(
            f"epoch {self.epoch - 1}: loss {average:g}; next: {self._schedule.phase}, "
            f"global_skip {self.global_skip}, local_skip {self.local_skip}, "
            f"batches_to_wait {self.batches_to_wait}"
        )

    def _end(self, steps: int) -> None:
        """Raise BatchesDiffer unless all ranks end the epoch after ``steps`` steps."""
        if self._nodes is not None:
            self._nodes.wait()  # The exchange in flight uses the same communicator.
        self._batches.end(steps)

    @torch.no_grad()
    def _synchronize_early(self) -> None:
        if self._nodes is None:
            return
        self._node.vote()
        self._node.average([])
        if self._apart:
            self._node.average_parameters()
        self._nodes.merge(self._batches.done - 1 - self._sent)
        self._nodes.average()

    def reset(self) -> None:
        """Go back to the first epoch and the first skips; discard the exchange in flight."""
        with self._or_abort():
            self._drop()
        self._schedule = self._new_schedule()
        self._batches.done = 0

    def _drop(self) -> None:
        if self._nodes is not None:
            self._nodes.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, for `load_state_dict`.

        Every rank saves its own, and its model's beside it. Waits for the exchange in flight.
        """
        with self._or_abort():
            nodes = None if self._nodes is None else self._nodes.state_dict()
        return {
            "settings": self._settings(),
            "schedule": self._schedule.state_dict(),
            "batch": self._batches.done,
            "last_batch": self._batches.all,
            "sent": self._sent,
            "apart": self._apart,
            "node": self._node.state_dict(),
            "nodes": nodes,
            **self._update.state_dict(),
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a DASO which loads the state must have, as numbers by name."""
        ranks = {"rank": self.comm.rank, "ranks": self.comm.size, "ranks of a node": self.loc_gpus}
        return {**ranks, **self.of_schedule, "local_weight": self.local_weight, **self._shapes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, to go on bit for bit, even in the middle of an epoch.

        This DASO must have the same arguments, and its model must have loaded its state too.

        Raises:
            ValueError: ``state`` is another rank's, or of another model or other arguments; nothing
                is loaded.
        """
        self._check(state)
        self._update.load_state_dict(state)  # First, because torch's own checks may raise.
        if self._nodes is not None:
            self._nodes.load_state_dict(state["nodes"])
        self._node.load_state_dict(state["node"])
        self._schedule.load_state_dict(state["schedule"])
        self._batches.done, self._batches.all = state["batch"], state["last_batch"]
        self._sent, self._apart = state["sent"], state["apart"]

    def _check(self, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` is not for this rank and these arguments."""
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"state lacks {sorted(missing)}; give what state_dict returned")
        check_same(state["settings"], self._settings())
        if self._nodes is not None:
            self._nodes.check(state["nodes"])
        self._update.check(state)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the communicators that were made for this; may be called again."""
        self._closed = True
        self._made.close()

    @contextmanager
    def _or_abort(self) -> Iterator[None]:
        """Abort the groups if the block raises on this rank alone, so that no rank waits for it."""
        if self._closed:
            raise CommunicatorError("this DASO is closed; make a new one")
        groups = (self.comm, self._levels) if self.comm.size > 1 else ()
        with or_abort(groups), self._levels.naming(), self._batches.explaining():
            yield

    def _give_up(self, error: BaseException) -> None:
        if not self._closed:
            abort((self.comm, self._levels), error)
