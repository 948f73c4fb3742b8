"""Checkpoints of trainers, in the files of `tagi_ddp.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tagi_ddp.checkpoint.folder import LATEST, Checkpoint, Folder
from tagi_ddp.checkpoint.tree import Snapshot, read_tree
from tagi_ddp.communicators import Communicator, all_gather_object
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


@dataclass
class State:
    """Where training is: finished epochs, and steps and samples of all ranks since the start.

    In the midst of an epoch, ``position`` is how many of its samples are done, and ``order`` what
    decides on which they are: the length of the data, the batch size and the seed.
    """

    epoch: int = 0
    num_steps: int = 0
    num_samples: int = 0
    position: int = 0
    order: dict[str, int] = field(default_factory=dict)

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


class Checkpoints:
    """A folder of checkpoints ``<number>-step-<steps>``, and ``latest``, a link to the last one.

    Rank 0's file holds the "state" of training, every parameter and buffer of the "task", and of a
    torch module's "model", whose "optimizer" is with it. Of a Sequential it holds the parameters
    and running statistics in "run"; a DDPSequential's other ranks have a file, too, so that all
    goes on as it was. `tagi_ddp.checkpoint.read_tree` reads a file without the trainer. A thread
    writes them, from a copy, while training goes on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Folder(folder)
        self._begun = False
        self._saved = -1  # after how many steps the last one was saved
        self._resumed: Checkpoint | None = None  # whose remaining parts are still to be loaded
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._keep: int | None = None
        self._comm: Communicator = SingleCommunicator()  # of the ranks that write

    def save(
        self,
        task_model: Any,
        optimizer: Any,
        state: State,
        callbacks: Mapping[str, Callback],
        only_last: bool,
    ) -> None:
        """Copy all, and let the files be written, if there were steps; a collective call.

        Waits for the files before, and raises what kept them from being written, as OSError.
        """
        if state.num_steps == self._saved:
            return
        self._wait()
        self._saved, self._keep = state.num_steps, 1 if only_last else None
        comm: Communicator = SingleCommunicator()
        if _is_network(task_model):
            task, network = task_model.task, task_model.model
            tree: dict[str, Any] = {"task": task.state_dict() if _is_module(task) else {}}
            if isinstance(network, DDPSequential):
                tree["run"], comm = network.run_state(), network.communicator
            else:
                tree["run"] = {"parameters": named_parameters(attach(network))}
        else:
            tree = {"model": {}, "task": {}}
            for name, value in full_state_dict(task_model).items():
                part, _, own = name.partition(".")
                tree[part][own] = value
            tree["optimizer"] = full_optimizer_state_dict(task_model, optimizer)
            if groups.rank_and_size()[0] > 0:
                return
        tree["state"] = asdict(state)
        tree["callbacks"] = {name: each.state_dict() for name, each in callbacks.items()}
        self._snapshot.take(tree)
        number = all_gather_object(comm, self._number(comm.rank))[0]
        checkpoint = self._folder.checkpoint(number, state.num_steps)
        run = {"step": state.num_steps, "ranks": comm.size, "state": asdict(state)}
        self._comm = comm
        self._writing = self._thread.submit(self._write, checkpoint, comm.rank, run)

    def _write(self, checkpoint: Checkpoint, rank: int, run: dict[str, Any]) -> None:
        self._folder.write(checkpoint, rank, self._snapshot.write, run)
        self._prune(rank)

    def _prune(self, rank: int) -> None:
        if self._keep is not None and rank == 0:
            self._folder.prune(self._keep)

    def _wait(self) -> None:
        """Return when this rank's file is written; raise what has kept it from that."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Return when the last one is whole; a collective call of the ranks that write it."""
        self._wait()
        self._comm.barrier()
        self._prune(self._comm.rank)
        self._comm = SingleCommunicator()

    def give_up(self) -> None:
        """Let this rank's file be written, after an error that counts more than one of that."""
        with suppress(Exception):
            self._wait()
        self._comm = SingleCommunicator()

    def _number(self, rank: int) -> int:
        """Return the number of the next one, on rank 0, which removes what was left half before."""
        if rank > 0:
            return 0
        if not self._begun:
            self._folder.clear()
            self._begun = True
        return max((each.number for each in self._folder.all()), default=0) + 1

    def load(self, task: Any, model: Any, path: str | Path | None) -> State:
        """Read the last one, or this one, into a task and a model that are not wrapped."""
        checkpoint = self._folder.at(self._folder.path / LATEST if path is None else Path(path))
        file = checkpoint.file_of(0)
        state = read_tree(file, "state")
        if "position" not in state:
            raise ValueError(
                f"{file} is of an earlier version, which did not tell where in an epoch it was: "
                "read_tree() reads it"
            )
        if _is_module(model):
            model.load_state_dict(read_tree(file, "model"))
        elif isinstance(model, DDPSequential):
            model.load_run_state(partial(_run_entry, checkpoint), checkpoint.ranks)
        else:
            load_parameters(attach(model), read_tree(file, "run", "parameters"))
        if _is_module(task):
            task.load_state_dict(read_tree(file, "task"))
        self._resumed = checkpoint
        self._saved = -1  # as many steps may come again
        return State(**state)

    def resume(self, task_model: Any, optimizer: Any, callbacks: Mapping[str, Callback]) -> None:
        """Load what needs the wrapped model, if `load` was called before; a collective call."""
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is None:
            return
        for name, state in read_tree(checkpoint.file_of(0), "callbacks").items():
            if name in callbacks:
                callbacks[name].load_state_dict(state)
        if optimizer is not None:
            saved = read_tree(checkpoint.file_of(0), "optimizer")
            load_optimizer_state_dict(task_model, optimizer, saved)
        elif isinstance(network := task_model.model, DDPSequential) and (
            "exchange" in read_tree(checkpoint.file_of(0), "run")
        ):
            network.load_run_state(partial(_run_entry, checkpoint), checkpoint.ranks)


def _is_network(task_model: Any) -> bool:
    model = getattr(task_model, "model", None)
    return model is not None and not _is_module(model)


def _is_module(part: Any) -> bool:
    return isinstance(part, nn.Module)


def _run_entry(checkpoint: Checkpoint, rank: int, name: str) -> Any:
    return read_tree(checkpoint.file_of(rank), "run", name)
