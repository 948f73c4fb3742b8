"""`dp`, `ddp` and `fsdp`: a model that all ranks train together, of torch or of pytagi."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from tagi_ddp.communicators.config import DDPConfig
from tagi_ddp.environment import rank_and_size
from tagi_ddp.optim.models import WRAPPERS, check_not_wrapped
from tagi_ddp.parallel import groups
from tagi_ddp.parallel.config import ParallelConfig
from tagi_ddp.parallel.task_model import TaskModel
from tagi_ddp.sequential.ddp_sequential import DDPSequential

T = TypeVar("T")
Settings = ParallelConfig | Mapping[str, Any] | None

# They shard between the ranks of a node, and replicate between nodes.
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def dp(
    model: T, cfg: Settings = None, *, node_size: int | None = None, **arguments: Any
) -> T | DistributedDataParallel | FullyShardedDataParallel:
    """Wrap a model for data parallel training, if necessary; a collective call.

    The number of processes is that of torch's default group, if it is initialised, else the
    launcher's: torchrun, mpirun, srun and ``tagi-ddp run`` count.

    Args:
        model: a torch.nn.Module; a pytagi Sequential; or a `TaskModel` over one of them.
        cfg: the settings, a mapping of them, or None for the defaults.
        node_size: for FSDP's hybrid strategies: the number of consecutive ranks of a node; None:
            the launcher's local world size, or the ranks of a host.
        arguments: for `ddp`, and only for it.

    Returns:
        the same object if there is one process, else what `fsdp` (if ``cfg.use_fsdp``) or `ddp`
        returns.

    Raises:
        TypeError, ValueError: ``cfg`` holds no settings, the model is wrapped already, or FSDP or a
            Sequential cannot do what the settings and arguments ask for.
        RuntimeError: torch.distributed could not be initialised; the text says how to.
    """
    with groups.all_raise():
        settings = ParallelConfig.from_argument("cfg", cfg)
        _check_arguments(arguments)
        if settings.use_fsdp:
            _refuse_ddp("with use_fsdp", settings, arguments)
    if rank_and_size()[1] == 1:
        return model
    wrapped: DistributedDataParallel | FullyShardedDataParallel = (
        fsdp(model, settings, node_size=node_size)
        if settings.use_fsdp
        else ddp(model, settings, **arguments)
    )
    return wrapped


def ddp(model: Any, cfg: Settings = None, **arguments: Any) -> Any:
    """Wrap a model for data parallel training, with all of it on every rank; a collective call.

    A torch module becomes torch's DistributedDataParallel on the default group, which is
    initialised if necessary. ``arguments`` are further arguments of DistributedDataParallel and
    override the settings; ``sync_module_states`` stands for ``init_sync``. Gradients are averaged:
    if the loss is a mean over samples and all shares are equal, the result is that of one process
    on the union of the shares. Buffers like running statistics are rank 0's, as of each forward.

    A Sequential becomes a DDPSequential that sums deltas: the result is that of one process on the
    union of any shares. Without torch's default group it uses the launcher's ranks. A TaskModel
    over a Sequential becomes a TaskModel over the DDPSequential.
    """
    settings, bare = _checked(model, cfg, (*WRAPPERS, FullyShardedDataParallel), arguments)
    if bare is not None:
        return _wrap_sequential(model, bare, settings, sharded=False)
    groups.initialise(settings.timeout)
    arguments = {**settings.of_ddp, **arguments}
    return DistributedDataParallel(model, init_sync=settings.sync_module_states, **arguments)


def fsdp(model: Any, cfg: Settings = None, *, node_size: int | None = None) -> Any:
    """Wrap a model for data parallel training, with a part of it on each rank; a collective call.

    A torch module becomes one unit of torch's FullyShardedDataParallel, with the parameters' own
    names, on the module's device. For finer units, wrap parts of the module by `fsdp` first. Hybrid
    strategies shard between the ranks of a node, all others between all ranks. Each rank keeps its
    own buffers. Make the optimizer from the parameters of the returned module; accumulate gradients
    by its ``no_sync()``.

    A Sequential becomes a DDPSequential, each rank of which updates its part of the parameters;
    with NO_SHARD it is that of `ddp`. The result is the same, bit for bit.
    """
    # Parts of the model may be units already, but not the model itself.
    whole = (FullyShardedDataParallel,) if isinstance(model, FullyShardedDataParallel) else ()
    settings, bare = _checked(model, cfg, (*WRAPPERS, *whole))
    if bare is not None:
        sharded = settings.sharding_strategy != ShardingStrategy.NO_SHARD
        return _wrap_sequential(model, bare, settings, sharded)
    groups.initialise(settings.timeout)
    if settings.sync_module_states:
        _take_from_rank_0(model)
    strategy, group = _strategy_and_group(settings.sharding_strategy, node_size)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    offload = settings.cpu_offload and device.type != "cpu"  # torch would ask for pinned memory
    with warnings.catch_warnings():  # torch advises DDP instead of NO_SHARD.
        warnings.filterwarnings("ignore", ".*NO_SHARD.* is deprecated", FutureWarning)
        wrapped = FullyShardedDataParallel(
            model,
            process_group=group,
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=offload),
            device_id=device,
            use_orig_params=True,
        )
    if offload:
        refuse_lost_gradients(wrapped)
    return wrapped


def _checked(
    model: Any,
    cfg: Settings,
    wrappers: tuple[type[nn.Module], ...],
    arguments: Mapping[str, Any] | None = None,
) -> tuple[ParallelConfig, Any]:
    """Return the settings, and the model's Sequential or None; all ranks raise an error of one.

    No part of a module may be one of ``wrappers``.
    """
    with groups.all_raise():
        settings = ParallelConfig.from_argument("cfg", cfg)
        bare = _sequential(model)
        if arguments is None:
            _refuse_ddp("for fsdp", settings, {})
        else:
            _check_arguments(arguments)
        if bare is None:
            check_not_wrapped("model", model, wrappers)
        else:
            _check_for_sequential(settings)
            _refuse_ddp("for a pytagi Sequential", settings, arguments or {})
    return settings, bare


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError unless all are arguments of DistributedDataParallel for `ddp`."""
    known = [*inspect.signature(DistributedDataParallel).parameters][1:]
    known.remove("init_sync")
    for name in arguments:
        if name not in known:
            raise TypeError(
                f"{name} is no argument of DistributedDataParallel for ddp; there are "
                f"{', '.join(known)}"
            )


def _refuse_ddp(where: str, settings: ParallelConfig, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if there are settings or arguments for DistributedDataParallel."""
    for name, value in {**settings.of_ddp, **arguments}.items():
        raise ValueError(
            f"{name} is for torch's DistributedDataParallel and must not be given {where}, "
            f"got {value!r}"
        )


# --- torch's modules -------------------------------------------------------------------------


def _strategy_and_group(strategy: ShardingStrategy, node_size: int | None) -> tuple[Any, Any]:
    """Return the strategy and the groups for torch with which all parameters end up equal.

    FSDP in a group of one rank would synchronise with no other rank.
    """
    if dist.get_world_size() == 1:
        return ShardingStrategy.NO_SHARD, dist.group.WORLD
    if strategy not in _HYBRID:
        return strategy, dist.group.WORLD
    pair = groups.node_groups(node_size)
    return (ShardingStrategy.NO_SHARD, dist.group.WORLD) if pair is None else (strategy, pair)


def _take_from_rank_0(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers, except those of parts that are sharded already."""
    if isinstance(model, FullyShardedDataParallel):
        return
    own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
    for tensor in own:
        dist.broadcast(tensor.detach(), 0)
    for child in model.children():
        _take_from_rank_0(child)


def refuse_lost_gradients(model: FullyShardedDataParallel) -> None:
    """Make backward raise RuntimeError if torch would replace reduced gradients, not add to them.

    With parameters offloaded to the CPU, torch adds up gradients under ``no_sync()`` only.
    """
    reduced = False

    def has_gradients() -> bool:
        return any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)

    def before_forward(*_: Any) -> None:
        # Check before the forward: on a GPU, that of one rank may show cleared gradients again.
        nonlocal reduced
        reduced = reduced and has_gradients()

    def before_backward(*_: Any) -> None:
        nonlocal reduced
        if reduced and has_gradients():
            raise RuntimeError(
                "with cpu_offload a second backward() would replace the gradients of the first: "
                "put all but the last of a step under model.no_sync(), and call zero_grad() after "
                "each step"
            )
        reduced = model._sync_gradients

    model.register_forward_pre_hook(before_forward)
    model.register_full_backward_pre_hook(before_backward)


# --- pytagi's Sequential ---------------------------------------------------------------------


def _sequential(model: Any) -> Any:
    """Return the Sequential of a model; None for a torch module."""
    bare = model.model if isinstance(model, TaskModel) else model
    if isinstance(bare, nn.Module):
        return None
    if isinstance(bare, DDPSequential):
        raise ValueError(
            "model must not be wrapped for parallel training already, but is a DDPSequential: give "
            "the Sequential that it was made of"
        )
    if not hasattr(bare, "_cpp_backend"):
        raise TypeError(
            "model must be a torch.nn.Module, a pytagi Sequential or a TaskModel over one of them, "
            f"got {'a TaskModel over ' * (bare is not model)}a {type(bare).__name__}"
        )
    if bare is not model and any(True for _ in model.parameters()):
        raise ValueError(
            "task has parameters of torch beside a pytagi Sequential, which would not be "
            "synchronised: leave them out"
        )
    return bare


def _check_for_sequential(cfg: ParallelConfig) -> None:
    """Raise ValueError if a Sequential cannot do what the settings ask for."""
    if cfg.cpu_offload:
        raise ValueError(
            "cpu_offload must be False for a pytagi Sequential, got True: its parameters stay on "
            "one device, and it has no optimizer's state"
        )
    if not cfg.sync_module_states:
        raise ValueError(
            "sync_module_states must be True for a pytagi Sequential, got False: a DDPSequential "
            "always begins with rank 0's parameters"
        )


def _wrap_sequential(model: Any, bare: Any, settings: ParallelConfig, sharded: bool) -> Any:
    """Return the DDPSequential of ``bare``, in a TaskModel if ``model`` is one."""
    if dist.is_initialized():
        group: dict[str, Any] = {"communicator": groups.communicator()}
    else:
        group = {"config": DDPConfig.from_env(timeout=settings.timeout)}
    wrapped = DDPSequential(bare, average=False, sharded=sharded, **group)
    return TaskModel(model.task, wrapped) if isinstance(model, TaskModel) else wrapped
