"""The trainer's part of its checkpoints: see `tagi_ddp.checkpoint.Checkpoints`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tagi_ddp.checkpoint.folder import LATEST, Checkpoint, Folder
from tagi_ddp.checkpoint.parts import run_state_of
from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.parallel import groups
from tagi_ddp.parallel.callbacks import Callback
from tagi_ddp.parallel.state_dicts import (
    full_optimizer_state_dict,
    full_state_dict,
    load_optimizer_state_dict,
)
from tagi_ddp.replica.host import attach
from tagi_ddp.sequential.ddp_sequential import DDPSequential
from tagi_ddp.sequential.run_state import load_parameters, named_parameters

PART = "trainer"


@dataclass
class State:
    """The progress of training: finished epochs, and all ranks' steps and samples since the start.

    In the midst of an epoch, ``position`` is how many of its samples are done, ``order`` what
    decides on which they are: the length of the data, the batch size and the seed; and ``loss`` the
    sum of this rank's losses over them.
    """

    epoch: int = 0
    num_steps: int = 0
    num_samples: int = 0
    position: int = 0
    order: dict[str, int] = field(default_factory=dict)
    loss: Any = field(default=0.0, compare=False, repr=False)  # a number, or a tensor of one

    def counts(self) -> dict[str, int]:
        """Return what tables of epochs tell of it."""
        return {name: getattr(self, name) for name in ("epoch", "num_steps", "num_samples")}

    def check_order(self, order: Mapping[str, int]) -> None:
        """Raise ValueError if samples of the epoch that has begun would be missed or come twice."""
        for name, before in self.order.items() if self.position else ():
            if order[name] != before:
                raise ValueError(
                    f"{name} must be {before} until the epoch that has begun is done, got "
                    f"{order[name]}: change it at an epoch's end"
                )


@dataclass
class Training:
    """A task and its model, the optimizer, the callbacks, where training is, by how many ranks.

    Rank 0's file holds the "state" of training, every parameter and buffer of the "task", and of a
    torch module's "model", whose "optimizer" is with it; of a Sequential the "parameters" and
    running statistics, of a DDPSequential all of its `run_state`.
    """

    task_model: Any
    optimizer: Any
    state: State
    callbacks: Mapping[str, Callback]
    ranks: int
    elastic = False

    @property
    def network(self) -> Any:
        """The model, if it is no torch module."""
        model = getattr(self.task_model, "model", None)
        return None if model is None or _is_module(model) else model

    @property
    def communicator(self) -> Communicator:
        """That of the ranks that train together."""
        if isinstance(self.network, DDPSequential):
            return self.network.communicator
        if self.network is not None or self.ranks == 1:
            return SingleCommunicator()
        from tagi_ddp.sharding.groups import communicator  # one for each group, kept with it

        return communicator(groups.world(), torch.device("cpu"))

    def run_state(self) -> dict[str, Any]:
        """Return all that goes on from here; a collective call."""
        tree: dict[str, Any] = {
            "state": {**asdict(self.state), "loss": float(self.state.loss)},
            "callbacks": {name: each.state_dict() for name, each in self.callbacks.items()},
            "task": {},
            "model": {},
            "optimizer": {},
            "buffers": [],
            "parameters": {},
            "exchange": None,  # there is none but of a DDPSequential
        }
        network = self.network
        if network is None:
            for name, value in full_state_dict(self.task_model).items():
                part, _, own = name.partition(".")
                tree[part][own] = value
            tree["optimizer"] = full_optimizer_state_dict(self.task_model, self.optimizer)
            if self.communicator.rank > 0:  # FSDP leaves each rank its own
                tree["buffers"] = list(self.task_model.buffers())
            return tree
        if _is_module(self.task_model.task):
            tree["task"] = self.task_model.task.state_dict()
        if isinstance(network, DDPSequential):
            return {**tree, **network.run_state()}
        return {**tree, "parameters": named_parameters(attach(network))}

    def check_run_state(self, entry: Callable[[int, str], Any], ranks: int) -> Callable[[], None]:
        """Read all but the parameters, which `load` has loaded; return what goes on from it."""
        comm = self.communicator
        callbacks = entry(0, "callbacks")
        same = ranks == comm.size
        whose = [comm.rank] if same else range(ranks if comm.rank == 0 else 0)
        loss = float(sum(entry(rank, "state")["loss"] for rank in whose))
        buffers = entry(comm.rank, "buffers") if same else []
        load_network: Callable[[], None] | None = None
        if self.optimizer is not None:
            optimizer = entry(0, "optimizer")
        elif isinstance(self.network, DDPSequential) and entry(0, "exchange") is not None:
            load_network = self.network.check_run_state(entry, ranks)

        def load() -> None:
            self.state.loss = loss
            for name in callbacks.keys() & self.callbacks.keys():
                self.callbacks[name].load_state_dict(callbacks[name])
            if self.optimizer is not None:
                load_optimizer_state_dict(self.task_model, self.optimizer, optimizer)
                if buffers:
                    for buffer, saved in zip(self.task_model.buffers(), buffers, strict=True):
                        buffer.copy_(saved)
            if load_network is not None:
                load_network()

        return load


def load(folder: Path, path: str | Path | None, task: Any, model: Any) -> tuple[Checkpoint, State]:
    """Read the last checkpoint, or this one, into a task and a model that are not wrapped."""
    if path is None and (whole := Folder(folder).whole()):
        checkpoint = whole[-1]
    else:
        checkpoint = Folder(folder).at(folder / LATEST if path is None else Path(path))
    parts = checkpoint.run.get("parts")
    if parts is None:
        raise ValueError(
            f"{checkpoint.path} is of an earlier version of the trainer, whose files had other "
            "entries: read_tree() reads them"
        )
    if parts != [PART]:
        raise ValueError(f"{checkpoint.path} is of no trainer: it holds {', '.join(parts)}")
    entry = partial(run_state_of, checkpoint, PART)
    state = State(**entry(0, "state"))
    saved = entry(0, "model" if _is_module(model) else "parameters")
    if not saved:
        kind = "TAGI network" if _is_module(model) else "torch module"
        raise ValueError(
            f"model must be a {kind}, which {checkpoint.path} is of, got a {type(model).__name__}"
        )
    if _is_module(model):
        _load_module(model, saved)
    elif not isinstance(model, DDPSequential):
        load_parameters(attach(model), saved)
    elif entry(0, "exchange") is not None:
        model.load_run_state(entry, checkpoint.ranks)
    else:
        raise ValueError(
            f"{checkpoint.path} is of a Sequential that was not wrapped: give the Sequential, "
            "which train() wraps"
        )
    if _is_module(task):
        _load_module(task, entry(0, "task"))
    return checkpoint, state


def _load_module(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a state; what would be rounded to a narrower dtype gets the wider one.

    Names are those of a module that torch.compile has not wrapped, nor any part of it.
    """
    own = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        plain = name.replace("_orig_mod.", "")
        own[plain], value = name, saved.get(plain)
        if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor):
            wide = torch.promote_types(tensor.dtype, value.dtype)
            if value.is_floating_point() or value.is_complex():
                tensor.data = tensor.data.to(wide)
    module.load_state_dict({own.get(name, name): value for name, value in saved.items()})


def _is_module(part: Any) -> bool:
    return isinstance(part, nn.Module)
