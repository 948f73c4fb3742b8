"""The comparison of the ranks' models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tagi_ddp.communicators.equality import Same


def compare_models(
    same: Same, name: str, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
) -> None:
    """Compare the parts of the model called ``name``, and the parameters of the optimizers.

    Raises TypeError if it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {model!r}")
    names: dict[Tensor, str] = {}
    for path, part in model.named_modules():
        same(f"{name} {path}".rstrip(), type(part).__name__)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        names[tensor] = path
        same(f"{name} {path}", _kind(tensor))
    for title, optimizer in optimizers.items():
        same(title, type(optimizer).__name__)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            path = f"{names[param]}, " if param in names else ""
            same(f"parameter {number} of {title}", f"{path}{_kind(param)}")


def _kind(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}{', frozen' if frozen else ''}"
