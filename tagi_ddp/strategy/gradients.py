"""Gradients of a model that is split over ranks, scaled to be right after the mean over all ranks.

Torch's DistributedDataParallel divides the sum of the W ranks' gradients by W; wanted is the mean
of the gradients of all losses.

- Model groups have a loss each, W/M of them. Behind the split each rank has a part of its loss's
  gradient, so that the sum over ranks is the sum over losses: W/M times the mean, and DDP's result
  is 1/M of it. Before the split all M ranks have the loss's whole gradient, since `shard_tensor`
  gathers it in backward, and DDP's result is right.
- Ensemble groups have a loss each, W/E of them, of the members that `gather_tensor` joins; in
  backward each member keeps its own slice. Members share the parameters, so what was said of the M
  ranks holds for E: DDP's result is 1/E of the mean behind the split and M/E of it before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tagi_ddp.strategy.layout import EnsembleLayout, GroupLayout

# Not attributes of the modules, which are copied and pickled with those.
_handles: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def scale_gradients(
    module: nn.Module, layout: GroupLayout | EnsembleLayout, skip: Sequence[str] = ("trainable",)
) -> None:
    """Scale the gradients of ``module`` in every backward from now on.

    They are multiplied by M, the ranks of a model group, and those before the split by 1; under an
    `EnsembleLayout` both by the number of members, too. What an earlier call did to the same module
    is undone first. Parameters that need no gradient now are not scaled later either, as
    DistributedDataParallel leaves them alone.

    Args:
        module: the model, not yet wrapped.
        layout: this rank's place.
        skip: the parameters with one of these in their full names are before the split.
    """
    remove_gradient_scale(module)
    before = layout.members if isinstance(layout, EnsembleLayout) else 1
    behind = before * layout.num_gpus_per_model
    handles = _handles[module] = []
    for name, parameter in module.named_parameters():
        factor = before if any(part in name for part in skip) else behind
        if factor != 1 and parameter.requires_grad:
            handles.append(parameter.register_hook(_times(factor)))


def remove_gradient_scale(module: nn.Module) -> None:
    """Undo `scale_gradients`; does nothing where it was not called."""
    for handle in _handles.pop(module, ()):
        handle.remove()


def _times(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: gradient * factor
