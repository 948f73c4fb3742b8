"""The state of a whole model or optimizer, for a file, with any wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from torch.distributed.tensor import DTensor

from tagi_ddp.checkpoint.module_states import state_of
from tagi_ddp.checkpoint.tree import check
from tagi_ddp.environment import rank_and_size
from tagi_ddp.optim.models import all_params
from tagi_ddp.parallel.task_model import TaskModel


def full_state_dict(model: Any) -> dict[str, Any]:
    """Return every parameter and buffer, on rank 0; other ranks get {}. A collective call.

    ``model`` is a result of `dp`, `ddp` or `fsdp`, or a model without wrapper. Names are those of
    the model before it was wrapped, whose own ``load_state_dict`` loads the result; tensors are on
    the CPU. For a Sequential this is its ``state_dict()``, which has no running statistics; for one
    in a `TaskModel` the names begin with "model.".
    """
    bare = model.model if isinstance(model, TaskModel) else model
    if isinstance(bare, nn.Module):
        if _is_sharded(model):
            options = StateDictOptions(full_state_dict=True, cpu_offload=_can_offload(model))
            for name, part in model.named_modules():
                path = f"{name}._extra_state".replace("_fsdp_wrapped_module.", "")
                check(_extra_state(part), path)
            state: Mapping[str, Any] = get_model_state_dict(model, options=options)
        else:
            state = state_of(model)
        if rank_and_size()[0] == 0:
            state = {name: _copied(value) for name, value in state.items()}
    else:
        prefix = "" if bare is model else "model."
        state = {prefix + name: values for name, values in bare.state_dict().items()}
    return dict(state) if rank_and_size()[0] == 0 else {}


def _is_sharded(model: nn.Module) -> bool:
    kinds = (FullyShardedDataParallel, FSDPModule)
    return any(isinstance(part, kinds) for part in model.modules()) or any(
        isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers())
    )


def _extra_state(module: nn.Module) -> Any:
    """Return a module's extra state; None if it has none."""
    own = type(module).get_extra_state is not nn.Module.get_extra_state
    return module.get_extra_state() if own else None


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if an optimizer holds, beside its tensors, a value that cannot be saved.

    torch's own errors do not name the value.
    """
    parts = {"state": optimizer.state.values(), "param_groups": optimizer.param_groups}
    for part, held in parts.items():
        for name, value in (item for each in held for item in each.items()):
            if name != "params" and not isinstance(value, torch.Tensor):
                check(value, f"optimizer/{part}/{name}")


def _can_offload(model: nn.Module) -> bool:
    """Return whether torch can gather on the CPU: if all units are sharded and not there yet."""
    units = [unit for unit in model.modules() if isinstance(unit, FullyShardedDataParallel)]
    return bool(units) and all(
        (unit.compute_device or torch.device("cpu")).type != "cpu"
        and unit.sharding_strategy != ShardingStrategy.NO_SHARD
        for unit in units
    )


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_mkldnn:  # torch cannot copy it.
        return value
    return value.detach().to("cpu", copy=True)


def full_optimizer_state_dict(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state on rank 0, by the parameters' names; a collective call."""
    sharded = _is_sharded(model)
    if sharded:
        _check_optimizer(optimizer)
    options = StateDictOptions(full_state_dict=sharded)
    with _kept_parameters(optimizer):
        state = get_optimizer_state_dict(model, optimizer, options=options)
    return dict(state) if rank_and_size()[0] == 0 else {}


def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Load a state of `full_optimizer_state_dict` on every rank; gradients are dropped."""
    optimizer.zero_grad(set_to_none=True)  # With gradients, torch assumes that there is a state.
    # A state is cut only if it is sharded: torch cannot cut that of plain SGD.
    sharded = _is_sharded(model)
    # Parameters that never had a gradient have no state.
    options = StateDictOptions(full_state_dict=sharded, strict=False)
    with _kept_parameters(optimizer):
        set_optimizer_state_dict(model, optimizer, state, options=options)


@contextmanager
def _kept_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the parameters after the block if torch makes the optimizer's first state in it.

    It does so by a step with gradients and a learning rate of zero. An optimizer that adds noise,
    or clips weights, changes parameters in such a step, too.
    """
    parameters = all_params(optimizer)
    if optimizer.state or any(each.grad is not None for each in parameters):
        yield
        return
    before = [each.detach().clone() for each in parameters]
    yield
    with torch.no_grad():
        for each, value in zip(parameters, before, strict=True):
            each.copy_(value)
