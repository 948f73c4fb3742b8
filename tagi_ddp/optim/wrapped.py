"""Modules that train another one on all ranks, and must not be wrapped again."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Wrapper(nn.Module):
    """The base class of modules that keep another one equal on all ranks."""


WRAPPERS: tuple[type[nn.Module], ...] = (Wrapper, nn.DataParallel, DistributedDataParallel)


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
