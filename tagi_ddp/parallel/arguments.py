"""Checks of the arguments of `BaseTrainer.train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tagi_ddp.optim.models import all_params
from tagi_ddp.parallel.callbacks import HELD_OUT, Callback


def check_callbacks(callbacks: Sequence[Callback], held_out: Any) -> None:
    """Raise ValueError if a callback needs the loss of held-out data, and there are none."""
    for callback in callbacks:
        if held_out is None and getattr(callback, "metric", None) == HELD_OUT:
            raise ValueError(
                f"held_out must be given, as {type(callback).__name__} needs {HELD_OUT!r}: or give "
                'it another metric, like metric="loss"'
            )


def check_factory(optimizer: Any, is_module: bool) -> None:
    """Raise TypeError unless it is a function, or None for a Sequential."""
    made = isinstance(optimizer, torch.optim.Optimizer)
    if callable(optimizer) and not made if is_module else optimizer is None:
        return
    takes = "a function of the parameters" if is_module else "None"
    got = f"an optimizer, {type(optimizer).__name__}" if made else repr(optimizer)
    like = ""
    if is_module and made:
        like = f": give one that makes it, like partial({type(optimizer).__name__}, lr=0.01)"
    raise TypeError(f"optimizer must be {takes} for this model, got {got}{like}")


def check_optimizer(optimizer: Any, own: set[Any]) -> None:
    """Raise TypeError or ValueError unless it is an optimizer of these parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must return a torch.optim.Optimizer, got a {kind}")
    params = all_params(optimizer)
    if others := sum(param not in own for param in params):
        raise ValueError(
            f"optimizer must hold only the parameters that it is given, but {others} of its "
            f"{len(params)} are another model's"
        )
