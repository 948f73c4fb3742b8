"""BaseTrainer: epochs and batches for torch modules and pytagi Sequentials, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tagi_ddp.checks import integer
from tagi_ddp.communicators.guard import Closing
from tagi_ddp.data import DistributedSampler
from tagi_ddp.parallel import groups
from tagi_ddp.parallel.arguments import check_callbacks, check_factory, check_optimizer
from tagi_ddp.parallel.batches import Data, check_data, take
from tagi_ddp.parallel.callbacks import HELD_OUT, Callback, named
from tagi_ddp.parallel.checkpoints import Checkpoints, State
from tagi_ddp.parallel.config import EXP_NAME, MISSING, Config
from tagi_ddp.parallel.task_model import ModelT, TaskModel, TaskT
from tagi_ddp.sequential.ddp_sequential import DDPSequential

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


@dataclass
class CheckpointConfig(Config):
    """When the trainer writes checkpoints, beside the one at the end.

    Args:
        save_every_n_steps: after every so many steps; None: at the end only.
        only_save_most_recent: remove the older ones.
    """

    save_every_n_steps: int | None = field(default=None, metadata={"low": 1})
    only_save_most_recent: bool = False


@dataclass
class BaseTrainerConfig(Config):
    """The settings of a trainer.

    Args:
        name: of the run; must be given.
        exp_name: of the experiment, whose losses go to ``<exp_name>.jsonl``; by default the name.
        exp_dir: the folder of all files; must be given.
        log_dir_name: the folder of losses in ``exp_dir``.
        use_double_weight_precision: train parameters of float64; for torch modules.
        checkpoint: when to write checkpoints.
    """

    name: str = MISSING
    exp_name: str = EXP_NAME
    exp_dir: str = MISSING
    log_dir_name: str = "logs"
    use_double_weight_precision: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


TrainerConfigT = TypeVar("TrainerConfigT", bound=BaseTrainerConfig)


class BaseTrainer(Closing, Generic[TrainerConfigT, ModelT, TaskT]):
    """Trains a task's model; a context manager, which leaves a Sequential's group at its end.

    Files are folders ``exp_dir/checkpoints/<number>-step-<steps>``, with a link ``latest`` to the
    last one, and ``exp_dir/<log_dir_name>/<exp_name>.jsonl``, a line for each epoch.
    ``should_stop``: set it, on all ranks, to end `train` after the present epoch.

    Args:
        config: the settings, a mapping of them, nested ones from nested mappings, or None for the
            defaults. A mapping is read as ``config_type``, which subclasses may set.

    Raises TypeError or ValueError that names the setting, when it is not as it must be, or when
    there is no name or no folder.
    """

    config_type: ClassVar[type[Config]] = BaseTrainerConfig

    def __init__(self, config: TrainerConfigT | Mapping[str, Any] | None) -> None:
        config = cast(TrainerConfigT, self.config_type.given("config", config))
        for name in ("name", "exp_dir"):
            if getattr(config, name) == MISSING:
                raise ValueError(f"{name} must be given: {type(config).__name__}({name}=...)")
        self.config = config
        self.exp_name = config.name if config.exp_name == EXP_NAME else config.exp_name
        self.exp_dir = Path(config.exp_dir)
        self.log_dir = self.exp_dir / config.log_dir_name
        self.state = State()
        self.task_model: Any = None
        self.should_stop = False
        self._callbacks: dict[str, Callback] = {}
        self._checkpoints = Checkpoints(self.exp_dir / "checkpoints")
        self._others: dict[str, Checkpoints] = {}
        self._of: tuple[Any, Any] = (None, None)  # the task and the model of task_model
        self._network: Any = None  # its model if that is no torch module
        self._optimizer: torch.optim.Optimizer | None = None
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
    ) -> list[float]:
        """Train until ``epochs`` epochs are done, from where ``state`` is; write a checkpoint.

        Each epoch has an order of its own, drawn from ``seed``, the same for any number of ranks,
        each of which takes its share of every batch. Shares that differ are weighted, so that a
        step is that of one process on the whole batch if the loss is a mean over samples.

        Args:
            task: what `TaskModel` takes, like a `Task`.
            model: a torch module or a pytagi Sequential; trained in place, but for FSDP, whose
                parameters are in `task_model` and the checkpoints.
            data: arrays or tensors of one length, like ``(x, y)``, whose slices make a batch, or a
                torch dataset, whose samples are collated. A torch module gets tensors on its
                device, floats of its dtype; a Sequential gets what the slices are.
            epochs: how many there are in all.
            batch_size: of all ranks together.
            optimizer: makes one of the parameters, like ``partial(Adam, lr=0.01)``; None for a
                Sequential, which has `step`.
            seed: start of the order, the same on all ranks.
            held_out: data like ``data``, on which `evaluate` finds a "held_out_loss" after each
                epoch.
            callbacks: what each epoch's metrics go to, in this order, which also write tables, stop
                early or keep the best; the same on all ranks. Checkpoints hold their states.

        Returns:
            the mean loss of each epoch, over the samples of all ranks; fewer than ``epochs`` if
            training was stopped or had begun before.

        Raises:
            TypeError, ValueError: naming the argument, what it got and what it takes.
        """
        rank, size = self.rank, self.world_size
        is_module = isinstance(model, nn.Module)
        with self._all_raise(is_module):
            check_factory(optimizer, is_module)
            integer("epochs", epochs, 0)
            batch_size, seed = integer("batch_size", batch_size, 1), integer("seed", seed, 0)
            needy = size if is_module else 1  # torch needs a sample on every rank
            length = check_data("data", data, batch_size, needy)
            if held_out is not None:
                check_data("held_out", held_out, batch_size, needy)
            check_callbacks(callbacks, held_out)
            order = {"length of data": length, "batch_size": batch_size, "seed": seed}
            if self.state.epoch < epochs:
                self.state.check_order(order)
        try:
            task_model = self._prepare(task, model)
            step = self._step_of(task_model, optimizer)
            self._callbacks = named(callbacks)
            self._checkpoints.resume(task_model, self._optimizer, self._callbacks)
            sampler = DistributedSampler(length, size, rank, seed=seed)
            losses: list[float] = []
            self.should_stop = False
            while self.state.epoch < epochs and not self.should_stop:
                self.state.order = order
                loss = self._train_epoch(task_model, step, data, sampler, batch_size)
                losses.append(loss)
                self._end_epoch(task_model, loss, held_out, batch_size)
            self._save(task_model)
            self._finish()
        except BaseException as error:
            self._give_up(error)  # first, as the others wait
            for checkpoints in (self._checkpoints, *self._others.values()):
                checkpoints.give_up()
            self.close()
            raise
        finally:
            for callback in self._callbacks.values():
                callback.on_train_end(self)
        return losses

    def evaluate(self, data: Data, *, batch_size: int) -> float:
        """Return the mean loss of `task_model` over all samples, of all ranks; no training."""
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

    def load_checkpoint(self, task: TaskT, model: ModelT, path: str | Path | None = None) -> State:
        """Load the last checkpoint, or that of ``path``, into a task and a model, before `train`.

        `train` then goes on after its last batch, with the optimizer's state, as if it had not been
        interrupted. ``path`` is a folder in ``checkpoints``, for an earlier one. Returns `state`.

        Raises FileNotFoundError where there is none that is whole, ValueError for one of an earlier
        version.
        """
        self.state = self._checkpoints.load(task, model, path)
        self._others = {}  # what these saved after as many steps is of another run
        return self.state

    def close(self) -> None:
        """Leave the group of a Sequential; the model stays usable on its own."""
        self.task_model, self._of, self._network = None, (None, None), None
        self._open.close()

    def _give_up(self, error: BaseException) -> None:
        """Let the other ranks learn of the error, if their group can tell them."""
        if self.task_model is not None and self._network is None:
            groups.give_up(error)
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
        """Return a `TaskModel` of both, or what wraps one."""
        return TaskModel(task, model)

    def _rank_and_size(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""
        return 0, 1

    def _all_raise(self, is_module: bool) -> AbstractContextManager[None]:
        """Return a block whose errors all ranks raise, before they train a module or a network."""
        return nullcontext()

    # --- training -----------------------------------------------------------------------------

    def _prepare(self, task: TaskT, model: ModelT) -> Any:
        if self._of[0] is not task or self._of[1] is not model:
            self.close()
            self.task_model = self._get_task_model(task, model)
            self._of = task, model
            if not isinstance(model, nn.Module):
                self._network = self.task_model.model
            if isinstance(self._network, DDPSequential) and self._network is not model:
                self._open.enter_context(self._network)
        return self.task_model

    def _step_of(self, task_model: Any, factory: OptimizerFactory | None) -> Callable[[Any], None]:
        """Return what follows a loss: backward, and the update."""
        self._optimizer = None
        if factory is None:
            network = self._network

            def step(loss: Any) -> None:
                loss.backward()
                network.step()

            return step
        self._optimizer = optimizer = factory(task_model.parameters())
        check_optimizer(optimizer, set(task_model.parameters()))

        def descend(loss: Any) -> None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return descend

    def _train_epoch(
        self,
        task_model: Any,
        step: Callable[[Any], None],
        data: Data,
        sampler: DistributedSampler,
        batch_size: int,
    ) -> float:
        """Train on what is left of an epoch; return the mean loss."""
        state, is_module = self.state, self._network is None
        sampler.set_epoch(state.epoch)
        begin, length = state.position, state.order["length of data"]
        total: Any = 0.0
        task_model.train()
        shares = sampler.batches(batch_size)
        for start in range(begin, length, batch_size):
            share, samples = shares[start // batch_size], min(batch_size, length - start)
            loss = task_model(take(data, share, task_model), state)
            weight = len(share) * sampler.num_replicas / samples
            for callback in self._callbacks.values():
                callback.on_before_step(self, samples, start + batch_size >= length)
            step(loss * weight if is_module and weight != 1 else loss)
            exact = loss.detach().to(_exact(loss.device)) if is_module else float(loss)
            total = total + exact * len(share)
            state.num_steps += 1
            state.num_samples += samples
            state.position += samples
            if start + batch_size < length:
                self._after_step(task_model)
        state.epoch, state.position, state.order = state.epoch + 1, 0, {}
        return self._sum(float(total)) / (length - begin)

    def _end_epoch(
        self, task_model: Any, loss: float, held_out: Data | None, batch_size: int
    ) -> None:
        metrics = {"loss": loss}
        if held_out is not None:
            metrics[HELD_OUT] = self.evaluate(held_out, batch_size=batch_size)
        for callback in self._callbacks.values():
            callback.on_epoch_end(self, metrics)
        self._log(metrics)
        for callback in self._callbacks.values():
            callback.on_metrics(self, metrics)
        self._after_step(task_model)

    def _after_step(self, task_model: Any) -> None:
        every = self.config.checkpoint.save_every_n_steps
        if every and self.state.num_steps % every == 0:
            self._save(task_model)

    def _save(self, task_model: Any) -> None:
        only_last = self.config.checkpoint.only_save_most_recent
        self._checkpoints.save(task_model, self._optimizer, self.state, self._callbacks, only_last)

    def save_checkpoint(self, folder: str) -> None:
        """Write a checkpoint, the only one, to ``exp_dir/<folder>``; a collective call."""
        checkpoints = self._others.setdefault(folder, Checkpoints(self.exp_dir / folder))
        checkpoints.save(self.task_model, self._optimizer, self.state, self._callbacks, True)

    def _finish(self) -> None:
        """Return when all checkpoints are whole, on all ranks, which raise if one is not."""
        problem: Exception | None = None
        try:
            for checkpoints in (self._checkpoints, *self._others.values()):
                checkpoints.finish()
        except Exception as error:
            if self._network is not None:  # its group tells the others
                raise
            problem = error
        # A module's are written by rank 0 alone, for which the others wait here.
        failed = self._network is None and self._sum(float(problem is not None)) > 0
        if problem is not None:
            raise problem
        if failed:
            raise OSError("rank 0 could not write a checkpoint; its own error tells why")

    def _sum(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        if self.world_size == 1:
            return value
        if self._network is not None:
            total = np.array([value])
            self._network.communicator.all_reduce(total)
            return float(total[0])
        device = next(self.task_model.parameters()).device
        tensor = torch.tensor([value], dtype=_exact(device), device=device)
        dist.all_reduce(tensor)
        return tensor.item()

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self.rank == 0:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            with open(self.log_dir / f"{self.exp_name}.jsonl", "a") as file:
                file.write(json.dumps({**self.state.counts(), **metrics}) + "\n")


def _exact(device: torch.device) -> torch.dtype:
    """Return the dtype that losses are added up in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
