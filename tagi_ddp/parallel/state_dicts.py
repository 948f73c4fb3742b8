"""All of a model, however it is wrapped, for a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tagi_ddp.parallel import groups
from tagi_ddp.parallel.task_model import TaskModel
from tagi_ddp.replica.host import attach
from tagi_ddp.replica.protocol import Replica
from tagi_ddp.sequential.interface import SequentialInterface


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


def running_statistics(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return copies of a Sequential's running statistics by layer."""
    return {
        layer: {name: torch.tensor(array) for name, array in arrays.items()}
        for layer, arrays in _statistics(_replica(model)).items()
    }


def load_running_statistics(model: Any, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write what `running_statistics` has returned into a Sequential."""
    replica = _replica(model)
    for layer, arrays in _statistics(replica).items():
        for name, array in arrays.items():
            array[...] = state[layer][name].numpy()
    replica.push()


def _replica(model: Any) -> Replica:
    replica: Replica = model._replica if isinstance(model, SequentialInterface) else attach(model)
    replica.pull()
    replica.export()
    return replica


def _statistics(replica: Replica) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for layer, arrays in zip(replica.layers, replica.arrays(), strict=True):
        names = ("mu_ra", "var_ra", "first_batch")
        if all(name in arrays for name in names):
            found[layer.name] = {name: arrays[name] for name in names}
    return found
