"""Callbacks of a trainer: stop early, keep the best checkpoint, write tables of metrics."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tagi_ddp.checks import integer, real
from tagi_ddp.engine.whole_file import whole_file

HELD_OUT = "held_out_loss"

Metrics = dict[str, float]


class Trainer(Protocol):
    """The attributes of a trainer that callbacks use; see `BaseTrainer`."""

    task_model: Any
    state: Any
    should_stop: bool
    exp_name: str
    exp_dir: Path
    log_dir: Path

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    def save_checkpoint(self, folder: str) -> None:
        """Write a checkpoint, the only one, to ``exp_dir/<folder>``; a collective call."""
        ...


class Callback:
    """Base of callbacks, whose hooks do nothing; all ranks call them, with the same metrics.

    ``metrics`` has "loss", the epoch's mean, and with held-out data "held_out_loss", for a
    `GaussianLoss` the negative log-likelihood of a sample.
    """

    def on_before_step(self, trainer: Trainer, samples: int, last: bool) -> None:
        """Do something before a step on so many samples of all ranks, the ``last`` of an epoch."""

    def on_epoch_end(self, trainer: Trainer, metrics: Metrics) -> None:
        """Add to the metrics, or set ``trainer.should_stop``."""

    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        """Use the metrics, to which all callbacks have added theirs."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Close open files at the end of `train`, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and text that checkpoints keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`."""


def check_callbacks(callbacks: Sequence[Callback], held_out: Any) -> None:
    """Raise ValueError if a callback needs the loss of held-out data, and there are none."""
    for callback in callbacks:
        if held_out is None and getattr(callback, "metric", None) == HELD_OUT:
            raise ValueError(
                f"held_out must be given, as {type(callback).__name__} needs {HELD_OUT!r}: or give "
                'it another metric, like metric="loss"'
            )


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by their class and their number among the callbacks of that class."""
    counts: Counter[str] = Counter()
    found = {}
    for callback in callbacks:
        kind = type(callback).__name__
        found[f"{kind} {counts[kind]}"] = callback
        counts[kind] += 1
    return found


class _Best:
    """The least value of a metric so far; NaN is never the least."""

    def __init__(self, metric: str, min_delta: float) -> None:
        self.metric = metric
        self.min_delta = min_delta
        self.value = math.inf

    def improves(self, metrics: Metrics) -> bool:
        """Return whether the value is less by more than ``min_delta``; if so, keep it."""
        if self.metric not in metrics:
            known = ", ".join(metrics)
            raise ValueError(f"there is no {self.metric!r} among the metrics {known}")
        better = metrics[self.metric] < self.value - self.min_delta
        if better:
            self.value = metrics[self.metric]
        return better


class EarlyStopping(Callback):
    """A callback that ends training if a metric has not become less for ``patience`` epochs.

    Args:
        patience: the number of epochs in a row, at least 1.
        min_delta: a metric that is less by no more than this has not become less.
        metric: by default the loss of the held-out data.
    """

    def __init__(self, patience: int = 5, min_delta: float = 0.0, metric: str = HELD_OUT) -> None:
        self.patience: int = integer("patience", patience, 1)
        self.metric = metric
        self._best = _Best(metric, real("min_delta", min_delta))
        self._waited = 0

    def on_epoch_end(self, trainer: Trainer, metrics: Metrics) -> None:
        self._waited = 0 if self._best.improves(metrics) else self._waited + 1
        if self._waited >= self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best.value, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best.value, self._waited = float(state["best"]), int(state["waited"])


class BestCheckpoint(Callback):
    """A callback that keeps the checkpoint with the least metric: ``exp_dir/best/latest``.

    ``trainer.load_checkpoint(task, model, trainer.exp_dir / "best" / "latest")`` loads it.

    Args:
        metric: by default the loss of the held-out data; the folder of another one is
            ``best-<metric>``.
    """

    def __init__(self, metric: str = HELD_OUT) -> None:
        self.metric = metric
        self._best = _Best(metric, 0.0)

    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        if self._best.improves(metrics):
            trainer.save_checkpoint("best" if self.metric == HELD_OUT else f"best-{self.metric}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best.value = float(state["best"])


class CSVLogger(Callback):
    """A callback by which rank 0 writes a table of epochs; a resumed run replaces repeated rows.

    Args:
        path: the file; by default ``<exp_name>.csv`` in the trainer's ``log_dir``. If it holds
            something else, ValueError is raised.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path

    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.rank > 0:
            return
        default = trainer.log_dir / f"{trainer.exp_name}.csv"
        path = default if self._path is None else Path(self._path)
        row = {**trainer.state.counts(), **metrics}
        kept: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                rows = csv.DictReader(file)
                if "epoch" not in (rows.fieldnames or ()):
                    raise ValueError(f"path is no table of a CSVLogger: {path}; give another one")
                kept = [each for each in rows if int(each["epoch"]) < row["epoch"]]
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = list(dict.fromkeys([*(kept[0] if kept else ()), *row]))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, columns)
        table.writeheader()
        table.writerows([*kept, row])
        with whole_file(path) as file:
            file.write(text.getvalue().encode())


class TensorBoardLogger(Callback):
    """A callback by which rank 0 writes events for TensorBoard, over the number of steps.

    Args:
        folder: by default ``tensorboard`` in the trainer's ``log_dir``.

    Raises ImportError if tensorboard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            text = "TensorBoardLogger needs tensorboard: pip install '.[tensorboard]'"
            raise ImportError(text) from error
        self._make, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.rank > 0:
            return
        folder = trainer.log_dir / "tensorboard" if self._folder is None else Path(self._folder)
        step = trainer.state.num_steps
        if self._writer is None:  # Hide what an interrupted run wrote for later steps.
            self._writer = self._make(str(folder), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def on_train_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
