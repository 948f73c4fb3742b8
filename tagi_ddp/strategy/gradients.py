"""Scales for the gradients of a split model: they make the mean over all ranks the right one.

Torch's DistributedDataParallel (DDP) divides the sum of the W ranks' gradients by W. The right
result is the mean of the gradients of all losses.

- Each of the W/M model groups has a loss. After the split each rank has a part of its loss's
  gradient. The sum over ranks is the sum over losses, W/M times the mean: DDP's result is 1/M of
  the mean. Before the split all M ranks have the loss's whole gradient, because `shard_tensor`
  gathers it in backward: DDP's result is right.
- Each of the W/E ensemble groups has a loss, of the members that `gather_tensor` joins. In backward
  each member keeps its own slice, and members share the parameters. Therefore E replaces M: DDP's
  result is 1/E of the mean after the split and M/E of it before.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from tagi_ddp.strategy.layout import EnsembleLayout, GroupLayout

# Attributes of the modules would be copied and pickled with them.
_handles: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def scale_gradients(
    module: nn.Module, layout: GroupLayout | EnsembleLayout, skip: Sequence[str] = ("trainable",)
) -> None:
    """Scale the gradients of ``module`` in every backward from now on.

    Before the split they are multiplied by 1, after it by M, the ranks of a model group; under an
    `EnsembleLayout` both by the number of members, too. An earlier call for the same module is
    undone first. Parameters that need no gradient now are not scaled later either:
    DistributedDataParallel leaves them alone.

    Args:
        module: the model, not yet wrapped.
        layout: that of this rank.
        skip: parameters are before the split if their full names contain one of these.
    """
    remove_gradient_scale(module)
    before = layout.members if isinstance(layout, EnsembleLayout) else 1
    after = before * layout.num_gpus_per_model
    handles = _handles[module] = []
    for name, parameter in module.named_parameters():
        factor = before if any(part in name for part in skip) else after
        if factor != 1 and parameter.requires_grad:
            handles.append(parameter.register_hook(partial(operator.mul, factor)))


def remove_gradient_scale(module: nn.Module) -> None:
    """Undo `scale_gradients`; do nothing if it was not called."""
    for handle in _handles.pop(module, ()):
        handle.remove()
