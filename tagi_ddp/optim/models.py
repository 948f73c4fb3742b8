"""Checks of modules and optimizers, and the comparison of the ranks' ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tagi_ddp.communicators.equality import Same


class Wrapper(nn.Module):
    """The base class of modules that keep another one equal on all ranks."""


WRAPPERS: tuple[type[nn.Module], ...] = (Wrapper, nn.DataParallel, DistributedDataParallel)


def all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


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
        for number, param in enumerate(all_params(optimizer)):
            path = f"{names[param]}, " if param in names else ""
            same(f"parameter {number} of {title}", f"{path}{_kind(param)}")


def _kind(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}{', frozen' if frozen else ''}"


def check_not_wrapped(
    name: str, module: nn.Module, kinds: tuple[type[nn.Module], ...] = WRAPPERS
) -> None:
    """Raise ValueError if the argument called ``name``, or a part of it, is wrapped already."""
    for path, part in module.named_modules():
        if isinstance(part, kinds):
            kind = type(part).__name__
            where = f"has one at {path!r}" if path else "is one"
            raise ValueError(
                f"{name} must not be wrapped for parallel training already, but {where}, a {kind}: "
                "give the module that it was made of"
            )


def refuse_sparse(name: str, model: nn.Module, remedy: str) -> None:
    """Raise TypeError if an embedding of ``model`` is set to have sparse gradients."""
    for path, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            weight = f"{path}.weight".lstrip(".")
            raise TypeError(f"{name} has sparse gradients of {weight}: {remedy}")
