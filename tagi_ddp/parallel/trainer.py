"""BaseTrainer: epochs and batches for torch modules and pytagi Sequentials, in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from torch import nn

from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.checkpoint.folder import Checkpoint
from tagi_ddp.checks import integer
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.communicators.guard import Closing
from tagi_ddp.data import DistributedSampler
from tagi_ddp.data.trackers import Tracker, Tracking, check_trackers
from tagi_ddp.environment import rank_and_size
from tagi_ddp.parallel import groups
from tagi_ddp.parallel.batches import Data, check_data, take
from tagi_ddp.parallel.callbacks import HELD_OUT, Callback, check_callbacks, named
from tagi_ddp.parallel.checkpoints import PART, State, Training, load, network_of
from tagi_ddp.parallel.config import EXP_NAME, MISSING, BaseTrainerConfig, Config
from tagi_ddp.parallel.task_model import (
    ModelT,
    OptimizerFactory,
    TaskModel,
    TaskT,
    check_factory,
    made_by,
)
from tagi_ddp.sequential.ddp_sequential import DDPSequential

_CHECKPOINTS = "checkpoints"  # the folder of the checkpoints that `load_checkpoint` loads


TrainerConfigT = TypeVar("TrainerConfigT", bound=BaseTrainerConfig)


class BaseTrainer(Closing, Generic[TrainerConfigT, ModelT, TaskT]):
    """A trainer of a task's model; a context manager that leaves a Sequential's group at its end.

    Files are folders ``exp_dir/checkpoints/<number>-step-<steps>``, with a link ``latest`` to the
    last one, and ``exp_dir/<log_dir_name>/<exp_name>.jsonl``, with a line for each epoch.
    ``should_stop``: set it, on all ranks, to end `train` after the present epoch.

    Args:
        config: the settings, a mapping of them, nested ones from nested mappings, or None for the
            defaults. A mapping is read as ``config_type``, which subclasses may set.

    Raises TypeError or ValueError that names the setting if it is wrong, or if the name or the
    folder is missing.
    """

    config_type: ClassVar[type[Config]] = BaseTrainerConfig

    def __init__(self, config: TrainerConfigT | Mapping[str, Any] | None) -> None:
        config = cast(TrainerConfigT, self.config_type.from_argument("config", config))
        for name in ("name", "exp_dir"):
            if getattr(config, name) == MISSING:
                raise ValueError(f"{name} must be given: {type(config).__name__}({name}=...)")
        self.config = config
        self.exp_name: str = config.name if config.exp_name == EXP_NAME else config.exp_name
        self.exp_dir: Path = Path(config.exp_dir)
        self.log_dir: Path = self.exp_dir / config.log_dir_name
        self.state: State = State()
        self.task_model: Any = None
        self.should_stop: bool = False
        self._callbacks: dict[str, Callback] = {}
        self._tracking = Tracking((), 0)
        self._folders: dict[str, Checkpoints] = {}  # opened by the present `train`
        self._saved: dict[str, int] = {}  # by folder, the steps before its last checkpoint
        self._resumed: Checkpoint | None = None  # loaded in part; `train` loads the other parts
        self._of: tuple[Any, Any] = (None, None)  # task and model of task_model
        self._optimizer: torch.optim.Optimizer | None = None
        self._unchecked = True  # until the content of checkpoints is checked, after the first step
        self._open = ExitStack()

    def train(
        self,
        task: TaskT,
        model: ModelT,
        data: Data,
        *,
        epochs: int,
        batch_size: int,
        optimizer: OptimizerFactory | None = None,
        seed: int = 0,
        held_out: Data | None = None,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[Tracker] = (),
    ) -> list[float]:
        """Train from ``state`` until ``epochs`` epochs are done; write a checkpoint.

        Each epoch has an order of its own, drawn from ``seed`` and the same for any number of
        ranks. Each rank takes its share of every batch. Shares of different sizes are weighted: if
        the loss is a mean over samples, a step is that of one process on the whole batch.

        Args:
            task: a `Task`, or another task for `TaskModel`.
            model: a torch module or a pytagi Sequential; trained in place, except for FSDP, whose
                parameters are in `task_model` and the checkpoints.
            data: arrays or tensors of one length, like ``(x, y)``, whose slices make a batch, or a
                torch dataset, whose samples are collated. A torch module gets tensors on its
                device, with floats of its dtype; if it has several, floats of none of them get the
                widest. A Sequential gets the slices as they are.
            epochs: the number of epochs in all.
            batch_size: of all ranks together.
            optimizer: makes an optimizer of the parameters, like ``partial(Adam, lr=0.01)``; None
                for a Sequential, which has `step`.
            seed: of the order, the same on all ranks.
            held_out: data like ``data``, for the "held_out_loss" that `evaluate` computes after
                each epoch.
            callbacks: are called with each epoch's metrics, in this order, to write tables, stop
                early or keep the best; the same on all ranks. Checkpoints hold their states.
            trackers: get each epoch's metrics, on rank 0 alone, and the number of steps so far.

        Returns:
            the mean loss of each epoch, over the samples of all ranks; fewer than ``epochs`` if
            training was stopped or had begun before.

        Raises:
            TypeError, ValueError: naming the argument, what it got and what it takes.
            CheckpointError: on all ranks, if one could not write or read a checkpoint; after the
                first step also if a part cannot be saved, which the text names.
        """
        is_module = isinstance(model, nn.Module)
        with self._all_raise(is_module):
            check_factory(optimizer, is_module)
            integer("epochs", epochs, 0)
            batch_size, seed = integer("batch_size", batch_size, 1), integer("seed", seed, 0)
            needy = self.world_size if is_module else 1  # torch needs a sample on every rank
            length = check_data("data", data, batch_size, needy)
            if held_out is not None:
                check_data("held_out", held_out, batch_size, needy)
            check_callbacks(callbacks, held_out)
            check_trackers(trackers)
            order = {"length of data": length, "batch_size": batch_size, "seed": seed}
            if self.state.epoch < epochs:
                self.state.check_order(order)
        try:
            task_model = self._prepare(task, model)
            self._optimizer = None if optimizer is None else made_by(optimizer, task_model)
            self._callbacks = named(callbacks)
            self._close_folders()
            if self._resumed is not None or not self._stands_by:
                self._in_folder(_CHECKPOINTS).go_on(self._resumed)
                self._resumed = None
            sampler = self._sampler_of(data, seed, batch_size)
            losses: list[float] = []
            self.should_stop, self._unchecked = False, not self._stands_by
            self._tracking = Tracking(() if self._stands_by else trackers, self.rank)
            with self._tracking.run(self.config.name, {**order, "epochs": epochs}):
                while self.state.epoch < epochs and not self.should_stop:
                    self.state.order = order
                    loss = self._train_epoch(task_model, data, sampler, batch_size)
                    losses.append(loss)
                    self._end_epoch(loss, held_out, batch_size)
                self.save_checkpoint(_CHECKPOINTS)
                for checkpoints in self._folders.values():
                    checkpoints.wait()
            self._close_folders()
        except BaseException as error:
            self._give_up(error)  # This is first, as the others wait.
            with suppress(Exception):  # The first error counts more than one of the files.
                self._close_folders()
            self.close()
            raise
        finally:
            for callback in self._callbacks.values():
                callback.on_train_end(self)
        return losses

    def _sampler_of(self, data: Data, seed: int, batch_size: int) -> DistributedSampler:
        """Return the sampler; raise RanksDiffer, on all ranks, if their data or settings differ."""
        rows: Any = data[0] if isinstance(data, tuple | list) else data
        sampler = DistributedSampler(rows, self.world_size, self.rank, seed=seed)
        sampler.begin(batch_size)
        if self.world_size > 1:
            remedy = "Give the same data and arguments on all ranks."
            group = self._part().communicator
            with all_or_none(group, "arguments of train()", remedy) as same:
                for entry in sampler.description:
                    same(*entry)
        return sampler

    def evaluate(self, data: Data, *, batch_size: int) -> float:
        """Return the mean loss of `task_model` over all samples, on all ranks; do not train."""
        if self.task_model is None:
            raise RuntimeError("evaluate() needs a train() before it")
        rank, size = self.rank, self.world_size
        integer("batch_size", batch_size, 1)
        length = check_data("data", data, batch_size, size if self._network is None else 1)
        sampler = DistributedSampler(length, size, rank, shuffle=False)
        total = 0.0
        self.task_model.eval()
        with torch.no_grad():
            for share in sampler.batches(batch_size):
                loss = self.task_model(take(data, share, self.task_model), self.state)
                total += float(loss) * len(share)
        return self._sum(total) / length

    def load_checkpoint(
        self, task: TaskT, model: ModelT, path: str | Path | None = None, fallback: bool = False
    ) -> State:
        """Load the last checkpoint, or that of ``path``, into a task and a model, before `train`.

        `train` then continues after its last batch, with the optimizer's state, as if it had not
        been interrupted. ``path`` is a folder in ``checkpoints``, for an earlier checkpoint. With
        ``fallback``, the one before is loaded, with a RuntimeWarning, if it is damaged. A module of
        a narrower dtype than the saved one gets the wider dtype. Return `state`.

        Raise FileNotFoundError if there is none; CheckpointError, before anything is loaded, if a
        file is damaged, of an earlier version, of another kind of model, or of no trainer.
        """
        self._resumed, self.state = load(self.exp_dir / _CHECKPOINTS, path, task, model, fallback)
        self._saved = {}  # The same number of steps may be saved again.
        return self.state

    def close(self) -> None:
        """Leave the group of a Sequential; the model stays usable on its own."""
        self._close_folders()
        self.task_model, self._of = None, (None, None)
        self._open.close()

    def _give_up(self, error: BaseException) -> None:
        """Abort the groups, if they can: other ranks that wait then raise the error."""
        if self.task_model is not None and self._network is None:
            groups.give_up(error)
            for checkpoints in self._folders.values():
                checkpoints._give_up(error)
        self._open.__exit__(type(error), error, error.__traceback__)

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._rank_and_size()[0]

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        return self._rank_and_size()[1]

    # --- what a mixin changes -----------------------------------------------------------------

    def _get_task_model(self, task: TaskT, model: ModelT) -> Any:
        """Return a `TaskModel` of both, or a wrapper of one."""
        return TaskModel(task, model)

    def _rank_and_size(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""
        return 0, 1

    def _all_raise(self, is_module: bool) -> AbstractContextManager[None]:
        """Return a context for checks before training; all ranks raise its errors."""
        return nullcontext()

    # --- training -----------------------------------------------------------------------------

    def _prepare(self, task: TaskT, model: ModelT) -> Any:
        if self._of[0] is not task or self._of[1] is not model:
            self.close()
            self.task_model = self._get_task_model(task, model)
            self._of = task, model
            if isinstance(self._network, DDPSequential) and self._network is not model:
                self._open.enter_context(self._network)
        return self.task_model

    def _step(self, loss: Any) -> None:
        """Run backward and the update."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        loss.backward()
        (self._network if self._optimizer is None else self._optimizer).step()

    def _train_epoch(
        self, task_model: Any, data: Data, sampler: DistributedSampler, batch_size: int
    ) -> float:
        """Train on the remaining batches of an epoch; return its mean loss."""
        state, is_module = self.state, self._network is None
        sampler.set_epoch(state.epoch)
        length = state.order["length of data"]
        task_model.train()
        shares = sampler.batches(batch_size)
        for start in range(state.position, length, batch_size):
            share, samples = shares[start // batch_size], min(batch_size, length - start)
            loss = task_model(take(data, share, task_model), state)
            weight = len(share) * sampler.num_replicas / samples
            for callback in self._callbacks.values():
                callback.on_before_step(self, samples, start + batch_size >= length)
            self._step(loss * weight if is_module and weight != 1 else loss)
            exact = loss.detach().to(groups.exact(loss.device)) if is_module else float(loss)
            state.loss = state.loss + exact * len(share)
            state.num_steps += 1
            state.num_samples += samples
            state.position += samples
            if self._unchecked:
                self._unchecked = False
                self._in_folder(_CHECKPOINTS).check()
            if start + batch_size < length:
                self._after_step()
        total = float(state.loss)
        state.epoch, state.position, state.order, state.loss = state.epoch + 1, 0, {}, 0.0
        return self._sum(total) / length

    def _end_epoch(self, loss: float, held_out: Data | None, batch_size: int) -> None:
        metrics = {"loss": loss}
        if held_out is not None:
            metrics[HELD_OUT] = self.evaluate(held_out, batch_size=batch_size)
        for callback in self._callbacks.values():
            callback.on_epoch_end(self, metrics)
        self._log(metrics)
        for callback in self._callbacks.values():
            callback.on_metrics(self, metrics)
        self._tracking.log(metrics, self.state.num_steps)
        self._after_step()

    def _after_step(self) -> None:
        every = self.config.checkpoint.save_every_n_steps
        if every and self.state.num_steps % every == 0:
            self.save_checkpoint(_CHECKPOINTS)
        if not self._stands_by:
            self._in_folder(_CHECKPOINTS).after_step(self.state.num_steps)

    def save_checkpoint(self, folder: str) -> None:
        """Write a checkpoint to ``exp_dir/<folder>``, unless it has the present step's; collective.

        It replaces earlier ones, except in ``checkpoints``, which keeps those of the settings.
        """
        if self._saved.get(folder) != self.state.num_steps and not self._stands_by:
            self._saved[folder] = self.state.num_steps
            self._in_folder(folder).save(self.state.num_steps)

    def _part(self) -> Training:
        """Return the part of a checkpoint that holds the training."""
        state = self.state, self._callbacks
        return Training(self.task_model, self._optimizer, *state, self.world_size)

    def _in_folder(self, name: str) -> Checkpoints:
        """Return the checkpoints of a folder in `exp_dir`; a collective call."""
        if name not in self._folders:
            only_last = name != _CHECKPOINTS or self.config.checkpoint.only_save_most_recent
            keep = 1 if only_last else sys.maxsize
            warned = name == _CHECKPOINTS and self.config.checkpoint.save_on_signal
            self._folders[name] = Checkpoints(
                self.exp_dir / name, {PART: self._part()}, keep=keep, on_signal=warned
            )
        return self._folders[name]

    @property
    def _network(self) -> Any:
        return network_of(self.task_model)

    @property
    def _stands_by(self) -> bool:
        """True if each of several processes trains the module alone, and this one does not save."""
        return self._network is None and self.world_size == 1 and rank_and_size()[0] > 0

    def _close_folders(self) -> None:
        """Wait for the files that are being written."""
        with ExitStack() as stack:
            for checkpoints in self._folders.values():
                stack.callback(checkpoints.close)
            self._folders = {}

    def _sum(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        if self.world_size == 1:
            return value
        if self._network is not None:
            total = np.array([value])
            self._network.communicator.all_reduce(total)
            return float(total[0])
        return groups.sum_of(value, next(self.task_model.parameters()).device)

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self.rank == 0:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            with open(self.log_dir / f"{self.exp_name}.jsonl", "a") as file:
                file.write(json.dumps({**self.state.counts(), **metrics}) + "\n")
