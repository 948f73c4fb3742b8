"""The content of the trainer's checkpoints; see `tagi_ddp.checkpoint.Checkpoints`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tagi_ddp.checkpoint.errors import CheckpointError
from tagi_ddp.checkpoint.folder import Checkpoint, Folder
from tagi_ddp.checkpoint.loading import load_last
from tagi_ddp.checkpoint.module_states import fitted
from tagi_ddp.checkpoint.parts import check_state, run_state_of
from tagi_ddp.checkpoint.tree import DamagedFile
from tagi_ddp.checks import integer, real
from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.equality import all_or_none
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
from tagi_ddp.sequential.run_state import check_fits, load_parameters, named_parameters

PART = "trainer"


@dataclass
class State:
    """The progress of training: finished epochs, and all ranks' steps and samples since the start.

    Within an epoch, ``position`` is the number of its samples that are done. ``order`` holds what
    their order depends on: the length of the data, the batch size and the seed. ``loss`` is the sum
    of this rank's losses over them.
    """

    epoch: int = 0
    num_steps: int = 0
    num_samples: int = 0
    position: int = 0
    order: dict[str, int] = field(default_factory=dict)
    loss: Any = field(default=0.0, compare=False, repr=False)  # a number, or a tensor of one

    def counts(self) -> dict[str, int]:
        """Return the numbers for tables of epochs."""
        return {name: getattr(self, name) for name in ("epoch", "num_steps", "num_samples")}

    def check(self) -> None:
        """Raise TypeError or ValueError that names a value that is no valid number."""
        for name, value in {**self.counts(), "position": self.position, **self.order}.items():
            integer(name, value, 0)
        real("loss", self.loss)

    def check_order(self, order: Mapping[str, int]) -> None:
        """Raise ValueError if samples of the epoch that has begun would be left out or repeated."""
        for name, before in self.order.items() if self.position else ():
            if order[name] != before:
                raise ValueError(
                    f"{name} must be {before} until the epoch that has begun is done, got "
                    f"{order[name]}: change it at an epoch's end"
                )


@dataclass
class Training:
    """The part of a checkpoint: a task, its model, the optimizer, the callbacks, and the state.

    Rank 0's file holds the "state" of training and every parameter and buffer of the "task". For a
    torch module it also holds those of the "model", and the "optimizer"; for a Sequential the
    "parameters" and running statistics; for a DDPSequential all of its `run_state`.
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
        return network_of(self.task_model)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks that train together."""
        if isinstance(self.network, DDPSequential):
            return self.network.communicator
        if self.network is not None or self.ranks == 1:
            return SingleCommunicator()
        return groups.communicator()

    def run_state(self) -> dict[str, Any]:
        """Return all that a resumed training needs; a collective call."""
        tree: dict[str, Any] = {
            "state": {**asdict(self.state), "loss": float(self.state.loss)},
            "callbacks": {name: each.state_dict() for name, each in self.callbacks.items()},
            "task": {},
            "model": {},
            "optimizer": {},
            "buffers": [],
            "parameters": {},
            "exchange": None,  # Only a DDPSequential has one.
        }
        network = self.network
        if network is None:
            for name, value in full_state_dict(self.task_model).items():
                part, _, own = name.partition(".")
                tree[part][own] = value
            tree["optimizer"] = full_optimizer_state_dict(self.task_model, self.optimizer)
            if self.communicator.rank > 0:  # With FSDP each rank has its own.
                tree["buffers"] = list(self.task_model.buffers())
            return tree
        if _is_module(self.task_model.task):
            tree["task"] = self.task_model.task.state_dict()
        if isinstance(network, DDPSequential):
            return {**tree, **network.run_state()}
        return {**tree, "parameters": named_parameters(attach(network))}

    def check_run_state(self, entry: Callable[[int, str], Any], ranks: int) -> Callable[[], None]:
        """Read all but the parameters, which `load` has loaded; return a function that loads it."""
        comm = self.communicator
        same = ranks == comm.size
        saved: dict[str, Any] = {"loss": 0.0, "exchange": None}
        with all_or_none(comm, "states of the trainer", "Nothing was loaded."):
            saved["callbacks"] = dict(entry(0, "callbacks"))
            for rank in [comm.rank] if same else range(ranks if comm.rank == 0 else 0):
                saved["loss"] += float(entry(rank, "state")["loss"])
            if self.optimizer is not None:
                saved["optimizer"] = entry(0, "optimizer")
                _check_optimizer(self.optimizer, saved["optimizer"])
                buffers = saved["buffers"] = list(entry(comm.rank, "buffers")) if same else []
                own = [buffer.shape for buffer in self.task_model.buffers()]
                if buffers and own != [buffer.shape for buffer in buffers]:
                    raise ValueError("the buffers that were saved are those of another module")
            elif isinstance(self.network, DDPSequential):
                saved["exchange"] = entry(0, "exchange")
        load_network: Callable[[], None] | None = None
        if saved["exchange"] is not None:
            load_network = self.network.check_run_state(entry, ranks)

        def load() -> None:
            self.state.loss = saved["loss"]
            for name in saved["callbacks"].keys() & self.callbacks.keys():
                self.callbacks[name].load_state_dict(saved["callbacks"][name])
            if self.optimizer is not None:
                load_optimizer_state_dict(self.task_model, self.optimizer, saved["optimizer"])
                if saved["buffers"]:
                    own = self.task_model.buffers()
                    for buffer, values in zip(own, saved["buffers"], strict=True):
                        buffer.copy_(values)
            if load_network is not None:
                load_network()

        return load


def network_of(task_model: Any) -> Any:
    """Return the model in a `TaskModel`, or in a wrapper of one, if it is no torch module."""
    model = getattr(task_model, "model", None)
    return None if _is_module(model) else model


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state has as many groups of parameters as the optimizer."""
    if len(saved["param_groups"]) != len(optimizer.param_groups) or not isinstance(
        saved["state"], Mapping
    ):
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, but "
            f"{len(saved['param_groups'])} were saved: give the one that was saved"
        )


def load(
    folder: Path, path: str | Path | None, task: Any, model: Any, fallback: bool = False
) -> tuple[Checkpoint, State]:
    """Load the last checkpoint, or that of ``path``, into a task and a model without wrappers.

    With ``fallback``, load the last one before it that is not damaged, if it is. Each rank verifies
    all ranks' files, so all choose the same one, and all raise CheckpointError if there is none.
    """
    found, until = Folder(folder), None
    if path is not None:
        first = found.at(Path(path))
        found, until = Folder(first.path.parent), first.number
    loaded = load_last(
        partial(found.last, None, until=until),
        partial(_checked, task, model),
        None if fallback else "load_checkpoint(fallback=True)",
    )
    if loaded is None:
        raise FileNotFoundError(f"there is no checkpoint in {folder}")
    return loaded


def _checked(task: Any, model: Any, checkpoint: Checkpoint) -> Callable[[], State]:
    """Read and check a checkpoint; return a function that loads it and returns the state."""
    for rank in range(checkpoint.ranks):
        checkpoint.verify(rank)
    parts = checkpoint.run.get("parts")
    if parts is None:
        raise CheckpointError(
            f"{checkpoint.path} is of an earlier version of the trainer, whose files had other "
            "entries: read_tree() reads them"
        )
    if parts != [PART]:
        raise CheckpointError(f"{checkpoint.path} is of no trainer: it holds {', '.join(parts)}")
    entry = partial(run_state_of, checkpoint, PART)
    saved = entry(0, "model" if _is_module(model) else "parameters")
    if not saved:
        kind = "TAGI network" if _is_module(model) else "torch module"
        raise CheckpointError(
            f"model must be a {kind}, which {checkpoint.path} is of, got a {type(model).__name__}"
        )
    loads: list[Callable[[], None]] = []
    try:
        state = State(**entry(0, "state"))
        state.check()
        if _is_module(model):
            loads.append(_loading("model", model, saved))
        elif not isinstance(model, DDPSequential):
            replica = attach(model)
            check_fits(named_parameters(replica), saved)
            loads.append(partial(load_parameters, replica, saved))
        elif entry(0, "exchange") is None:
            raise CheckpointError(
                f"{checkpoint.path} is of a Sequential that was not wrapped: give the Sequential, "
                "which train() wraps"
            )
        else:
            loads.append(partial(model.load_run_state, entry, checkpoint.ranks))
        if _is_module(task):
            loads.append(_loading("task", task, entry(0, "task")))
    except (CheckpointError, DamagedFile):
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.path} cannot be loaded: {error}") from error

    def load_all() -> State:
        for each in loads:
            each()
        return state

    return load_all


def _loading(name: str, module: nn.Module, saved: Mapping[str, Any]) -> Callable[[], None]:
    """Check a module's state; return a function that loads it.

    Tensors whose values would be rounded to a narrower dtype get the wider one.
    """
    tensors, state = module.state_dict(keep_vars=True), fitted(module, saved)
    check_state(name, module, state)

    def load() -> None:
        for each, tensor in tensors.items():
            value = state.get(each)
            if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor):
                wide = torch.promote_types(tensor.dtype, value.dtype)
                if value.is_floating_point() or value.is_complex():
                    tensor.data = tensor.data.to(wide)
        module.load_state_dict(state)

    return load


def _is_module(part: Any) -> bool:
    return isinstance(part, nn.Module)
