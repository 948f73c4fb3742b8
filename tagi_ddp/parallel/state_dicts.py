"""All of a model, however it is wrapped, for a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

from tagi_ddp.parallel import groups
from tagi_ddp.parallel.task_model import TaskModel

FULL = StateDictOptions(full_state_dict=True)


def full_state_dict(model: Any) -> dict[str, Any]:
    """Return every parameter and buffer, on rank 0; other ranks get {}. A collective call.

    ``model`` is what `dp`, `ddp` or `fsdp` returned, or no wrapper at all. Names are those of the
    model before it was wrapped, which loads this by its own ``load_state_dict``; tensors are on the
    CPU. Of a Sequential this is its ``state_dict()``, which has no running statistics; for one in a
    `TaskModel` with "model." in front of the names.
    """
    bare = model.model if isinstance(model, TaskModel) else model
    if isinstance(bare, nn.Module):
        options = StateDictOptions(full_state_dict=True, cpu_offload=_can_offload(model))
        state: Mapping[str, Any] = get_model_state_dict(model, options=options)
        if groups.rank_and_size()[0] == 0:
            state = {name: _copied(value) for name, value in state.items()}
    else:
        prefix = "" if bare is model else "model."
        state = {prefix + name: values for name, values in bare.state_dict().items()}
    return dict(state) if groups.rank_and_size()[0] == 0 else {}


def _can_offload(model: nn.Module) -> bool:
    """Tell whether torch can gather on the CPU: not what is there already, nor without shards."""
    units = [unit for unit in model.modules() if isinstance(unit, FullyShardedDataParallel)]
    return bool(units) and all(
        (unit.compute_device or torch.device("cpu")).type != "cpu"
        and unit.sharding_strategy != ShardingStrategy.NO_SHARD
        for unit in units
    )


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def full_optimizer_state_dict(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state on rank 0, by the parameters' names; a collective call."""
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    return dict(state) if groups.rank_and_size()[0] == 0 else {}


def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Load what `full_optimizer_state_dict` returned, on every rank; gradients go."""
    optimizer.zero_grad(set_to_none=True)  # or torch believes that there is a state already
    kinds = (FullyShardedDataParallel, FSDPModule)
    # Where nothing is sharded there is nothing to cut, which torch cannot do to plain SGD's state.
    sharded = any(isinstance(part, kinds) for part in model.modules())
    # Parameters that never had a gradient have no state.
    options = StateDictOptions(full_state_dict=sharded, strict=False)
    set_optimizer_state_dict(model, optimizer, state, options=options)
