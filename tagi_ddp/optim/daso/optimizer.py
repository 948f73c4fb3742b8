"""DASO for torch: nodes train as one, and exchange what they have learnt while they go on."""

from __future__ import annotations

import math
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tagi_ddp.checks import real
from tagi_ddp.optim.daso.arguments import Arguments
from tagi_ddp.optim.daso.attributes import Attributes
from tagi_ddp.optim.daso.finite import NotFinite
from tagi_ddp.optim.daso.node import Node, Tensors
from tagi_ddp.optim.daso.nodes import Nodes
from tagi_ddp.optim.daso.ranks import Ranks, adopt
from tagi_ddp.optim.daso.update import Update
from tagi_ddp.optim.schedule import Sync


class DASO(Attributes):
    """Distributed asynchronous and selective optimization around an optimizer of torch.

    The ranks of a node average their gradients after most batches. Nodes exchange their parameters
    after every batch of the first and the last epochs, and in between now and then, without
    waiting: see `SyncSchedule`. With one node it is data parallelism, after every batch.

    Making it is a collective call, and so are `step`, `epoch_loss_logic`, `set_model`, `reset` and
    `load_state_dict`. An epoch has ``last_batch`` batches, which must be set, and ends with
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

    Rank 0's parameters and buffers are where all begin. Afterwards trainable parameters and
    floating-point buffers are averaged, other buffers are rank 0's, and frozen parameters are left
    alone; call `set_model` again after adding, freezing, unfreezing or moving any. The optimizer's
    own state is not exchanged. Numbers that are NaN or infinite are noticed when nodes exchange
    them: all ranks raise FloatingPointError after the same batch, and apply nothing of it.

    Args:
        local_optimizer: of this rank's model; not one that needs a closure.
        total_epochs: how many epochs there will be.
        comm: of all ranks: a communicator, which stays open, a torch.distributed.ProcessGroup or
            one of mpi4py; None: `init()`.
        warmup_epochs, cooldown_epochs: how many epochs, at the beginning and at the end, average
            over all ranks after every batch.
        scheduler: a learning rate scheduler of torch, which `step` steps after the optimizer, so
            once a batch; None: there is none, or you step it.
        stability_level: a loss that improves on the best one by no more than this part of it is
            stable; after two such epochs nodes exchange more often.
        max_global_skips: the largest number of batches from one exchange between nodes to the next.
        sending_chunk_size: the largest number of elements of one operation.
        downcast_type: what is sent between nodes: torch.bfloat16, torch.half or torch.float. What
            casting drops is sent the next time; float64 is not cast.
        use_mpi_groups: accepted for compatibility; the communicator is split either way.
        skip_reduction_factor: what skips are divided by when the loss is stable.
        local_skip_factor: how many times a node's ranks synchronize for an exchange between nodes,
            at first.
        verbose: whether rank 0 prints what `print0` is given.
        node_size: how many consecutive ranks make a node; None: see `Hierarchy`.
        local_weight: when nodes' copies arrive S batches after they were sent, the local one counts
            as ``local_weight * S`` of them; 2 in the paper that `SyncSchedule` names.

    Raises:
        TypeError, ValueError: naming the argument and what it got; all types are checked before
            any value.
    """

    def __init__(
        self,
        local_optimizer: torch.optim.Optimizer,
        total_epochs: int,
        comm: Any = None,
        warmup_epochs: int = 4,
        cooldown_epochs: int = 4,
        scheduler: LRScheduler | None = None,
        stability_level: float = 0.05,
        max_global_skips: int = 8,
        sending_chunk_size: int = 10_000_000,
        downcast_type: torch.dtype = torch.bfloat16,
        use_mpi_groups: bool = True,
        skip_reduction_factor: int = 2,
        local_skip_factor: int = 4,
        verbose: bool = False,
        *,
        node_size: int | None = None,
        local_weight: float = 2.0,
    ) -> None:
        """Check the arguments, split the ranks into nodes, and begin with rank 0's parameters."""
        self._arguments = Arguments(
            local_optimizer,
            total_epochs,
            warmup_epochs,
            cooldown_epochs,
            scheduler,
            stability_level,
            max_global_skips,
            sending_chunk_size,
            downcast_type,
            use_mpi_groups,
            skip_reduction_factor,
            local_skip_factor,
            verbose,
            node_size,
            local_weight,
        )
        self._arguments.check_types()
        super().__init__(self._arguments)
        self._update = Update(local_optimizer, scheduler)
        self._batch = 0  # the number of the epoch's next one
        self._sent = 0  # the batch after which the last copy was sent
        self._apart = False  # whether ranks of a node have stepped alone
        with ExitStack() as made:
            world = adopt(comm, made)
            self._arguments.check_values()
            self._ranks = Ranks(world, node_size, made)
        try:
            self._schedule = self._arguments.schedule()
            self._begin(None)
        except BaseException as error:
            self._ranks.abort(error)
            self._ranks.close()
            raise

    def _begin(self, model: nn.Module | None) -> None:
        """Let all ranks begin with the parameters of rank 0."""
        arguments, levels = self._arguments, self._ranks.levels
        limit = arguments.sending_chunk_size
        tensors = Tensors(model, self.local_optimizer)
        tensors.begin(self.comm, limit)
        self._node = Node(levels.node, tensors, limit)
        self._nodes: Nodes | None = None
        if levels.nodes > 1:
            self._nodes = Nodes(
                levels,
                [*tensors.parameters, *tensors.floats],
                tensors.integers,
                arguments.downcast_type,
                limit,
                arguments.local_weight,
            )

    def add_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Let `step` step the optimizer by way of ``scaler``, and update that.

        Ranks of a node that average their gradients unscale them first, and skip the step together.
        """
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r}")
        self._update.scaler = scaler

    def set_model(self, model: nn.Module) -> None:
        """Take charge of the buffers of ``model`` and of parameters the optimizer does not know.

        Parameters, frozen ones too, and buffers become those of rank 0. `DataParallelMultiGPU`
        calls this.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: on all ranks, where models differ in more than numbers.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
        with self._ranks.or_abort():
            self._drop()
            self._begin(model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the optimizer's parameters."""
        self.local_optimizer.zero_grad(set_to_none)
        self.progress()

    def progress(self) -> None:
        """Let what is under way between nodes go on, without waiting for anything."""
        if self._nodes is not None and self._nodes.busy:
            with self._ranks.or_abort():
                self._nodes.progress()

    def step(self) -> None:
        """Step the optimizer, the scheduler and the scaler, then synchronize what is due.

        Raises:
            RuntimeError: ``last_batch`` is not set, or the epoch's last batch was before this one.
            FloatingPointError: on all ranks, when what they exchange is NaN or infinite.
        """
        if self._last_batch is None:
            raise RuntimeError("last_batch is not set: give it the number of batches of an epoch")
        if self._batch >= self._last_batch:
            raise RuntimeError(
                f"all {self._last_batch} batches of epoch {self.epoch} are done: call "
                "epoch_loss_logic at the end of each epoch"
            )
        sync = self._schedule.after(self._batch, self._last_batch)
        with self._ranks.or_abort():
            self._step(sync)
        self._batch += 1

    @torch.no_grad()
    def _step(self, sync: Sync) -> None:
        if self._nodes is not None:
            self._nodes.progress()
        together = self._nodes is None or sync.local or sync.blocking
        if together:
            self._update.together(self._node, all_ranks=self._nodes is None)
            if self._apart:
                self._node.average_parameters()
        else:
            self._update.alone()
            # For good: what optimizers remember, such as momentum, stays different.
            self._apart = self.loc_gpus > 1
        if self._nodes is None:
            return
        if sync.merge:
            self._nodes.merge(sync.merge)
        if sync.send is not None:
            self._nodes.send(sync.send % self.loc_gpus)
            self._sent = self._batch
        if sync.blocking:
            self._nodes.average()

    def epoch_loss_logic(
        self, loss: Tensor | int | float, loss_globally_averaged: bool = False
    ) -> None:
        """End the epoch, and choose the skips of the next one.

        If the epoch's last batch has not been, all ranks average first.

        Args:
            loss: of the epoch, on this rank.
            loss_globally_averaged: whether it is averaged over all ranks; else this does it.

        Raises:
            TypeError, ValueError: ``loss`` is no number.
            FloatingPointError: on all ranks, when the averaged loss is NaN or infinite.
        """
        if not isinstance(loss_globally_averaged, bool):
            raise TypeError(
                f"loss_globally_averaged must be a bool, got {loss_globally_averaged!r}"
            )
        value = _number(loss)
        with self._ranks.or_abort():
            if self._nodes is not None and 0 < self._batch != self._last_batch:
                self._synchronize_early(self._nodes)
            shared = torch.tensor([value], dtype=torch.float64, device=self.comm.device)
            if loss_globally_averaged:
                self.comm.broadcast(shared)  # as it may differ in the last bits
            else:
                self.comm.all_reduce(shared, "mean")
            average = shared.item()
            if not math.isfinite(average):
                raise NotFinite(f"the loss of all ranks is {average}: look at each rank's")
            self._schedule.end_epoch(average)
        self._batch = 0
        self.print0(
            f"epoch {self.epoch - 1}: loss {average:g}; next: {self._schedule.phase}, "
            f"global_skip {self.global_skip}, local_skip {self.local_skip}, "
            f"batches_to_wait {self.batches_to_wait}"
        )

    @torch.no_grad()
    def _synchronize_early(self, nodes: Nodes) -> None:
        self._node.vote()
        self._node.average([])
        if self._apart:
            self._node.average_parameters()
        nodes.merge(self._batch - 1 - self._sent)
        nodes.average()

    def reset(self) -> None:
        """Go back to the first epoch and the first skips; what is under way is dropped."""
        with self._ranks.or_abort():
            self._drop()
        self._schedule = self._arguments.schedule()
        self._batch = 0

    def _drop(self) -> None:
        if self._nodes is not None:
            self._nodes.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on from here, on this rank.

        Every rank saves its own, and its model's beside it. Waits for what is under way.
        """
        with self._ranks.or_abort():
            nodes = None if self._nodes is None else self._nodes.state_dict()
        return {
            "place": [self.comm.rank, self.comm.size, self.loc_gpus],
            "schedule": self._schedule.state_dict(),
            "batch": self._batch,
            "last_batch": self._last_batch,
            "sent": self._sent,
            "apart": self._apart,
            "node": self._node.state_dict(),
            "nodes": nodes,
            **self._update.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called, bit for bit, even in the middle of an epoch.

        For a DASO of the same arguments, whose model has loaded its state too.

        Raises:
            ValueError: ``state`` is another rank's, or of another model or other arguments.
        """
        self._check(state)
        if self._nodes is not None:
            self._nodes.load_state_dict(state["nodes"])
        self._node.load_state_dict(state["node"])
        self._schedule.load_state_dict(state["schedule"])
        self._batch, self._last_batch = state["batch"], state["last_batch"]
        self._sent, self._apart = state["sent"], state["apart"]
        self._update.load_state_dict(state)

    def _check(self, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` is not for this rank and these arguments."""
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"state lacks {sorted(missing)}; give what state_dict returned")
        place = [self.comm.rank, self.comm.size, self.loc_gpus]
        if state["place"] != place:
            raise ValueError(
                f"state is of [rank, ranks, ranks of a node] {state['place']}, this is {place}"
            )
        self._update.check(state)

    def close(self) -> None:
        """Leave the communicators that were made for this; may be called again."""
        self._ranks.close()

    def __enter__(self) -> DASO:
        """Return the optimizer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; when the block ended in an error of this rank alone the others learn it."""
        if error is not None:
            self._ranks.abort(error)
        self.close()


def _number(loss: Any) -> float:
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(f"loss must be one number, got a tensor of shape {tuple(loss.shape)}")
        loss = loss.item()
    return real("loss", loss)
