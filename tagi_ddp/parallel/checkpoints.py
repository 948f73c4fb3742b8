"""Files from which training goes on."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tagi_ddp.engine.whole_file import whole_file
from tagi_ddp.parallel import groups
from tagi_ddp.parallel.state_dicts import (
    full_state_dict,
    load_running_statistics,
    running_statistics,
)

_LAST = "ckpt.pt"


@dataclass
class State:
    """Where training is: finished epochs, and steps and samples of all ranks since the start."""

    epoch: int = 0
    num_steps: int = 0
    num_samples: int = 0


class Checkpoints:
    """A folder of files ``ckpt.<steps>.pt`` and ``ckpt.pt``, a link to the last one.

    A file holds every parameter and buffer of the "model" and of the "task", a Sequential's running
    "statistics", and the "state" of training. Without the trainer,
    ``model.load_state_dict(torch.load(path)["model"])`` reads it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, task_model: Any, state: State, only_last: bool) -> None:
        """Write a file on rank 0, whole or not at all; a collective call."""
        full = full_state_dict(task_model)
        if groups.rank_and_size()[0] > 0:
            return
        parts: dict[str, Any] = {"model": {}, "task": {}, "state": asdict(state)}
        for name, value in full.items():
            part, _, own = name.partition(".")
            parts[part][own] = value
        if _is_network(getattr(task_model, "model", None)):
            parts["statistics"] = running_statistics(task_model.model)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"ckpt.{state.num_steps}.pt"
        with whole_file(path) as file:
            torch.save(parts, file)
        link = self._folder / f".{_LAST}"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, self._folder / _LAST)
        if only_last:
            for other in self._folder.glob("ckpt.*.pt"):
                if other != path:
                    other.unlink()

    def load(self, task: Any, model: Any, path: str | Path | None) -> State:
        """Read the last file, or this one, into a task and a model that are not wrapped."""
        path = self._folder / _LAST if path is None else Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        parts = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(parts["model"])
        if _is_network(model):
            load_running_statistics(model, parts["statistics"])
        if isinstance(task, nn.Module):
            task.load_state_dict(parts["task"])
        return State(**parts["state"])


def _is_network(model: Any) -> bool:
    return model is not None and not isinstance(model, nn.Module)
