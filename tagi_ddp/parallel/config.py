"""Settings that check themselves, from code, a mapping, YAML or a command line."""

from __future__ import annotations

import copy
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from torch.distributed.fsdp import ShardingStrategy

from tagi_ddp.checks import integer, seconds
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from omegaconf import DictConfig, OmegaConf

C = TypeVar("C", bound="Config")

MISSING = "???"  # the value of a required field that is not set
EXP_NAME = "${ml.exp_name:null}"  # stands for the name of the run

_TAKES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class Config:
    """Base of dataclasses whose fields are checked when they are set, at first and later.

    OmegaConf knows their types, and converts what it can: "yes" to True, "3" to 3, names and
    numbers to members of an enum. A nested configuration takes a mapping too. In files and
    arguments "${name}" stands for the value of another setting in them.
    ``metadata={"check": check}``, of a field, is a further check: ``check(name, value)`` returns
    the value, or raises.

    Raises TypeError or ValueError that names the field, what it got and what it takes.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @classmethod
    def from_argument(cls: type[C], name: str, value: C | Mapping[str, Any] | None) -> C:
        """Return the settings of the argument called ``name``: settings, a mapping or None.

        None stands for the defaults.
        """
        if isinstance(value, cls):
            return value
        if value is not None and not isinstance(value, Mapping):
            kind = cls.__name__
            raise TypeError(f"{name} must be a {kind}, a mapping or None, got {value!r}")
        try:
            return cls.from_dict(value or {})
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}.{error}") from error

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """Return the settings of a mapping, nested ones from nested mappings."""
        for name in values:
            if name not in cls._hints():
                raise ValueError(f"{name} is no setting; there are {', '.join(cls._hints())}")
        return cls(**values)

    @classmethod
    def from_yaml(cls: type[C], path: str | Path) -> C:
        """Return the settings of a YAML file; errors name the file, too."""
        values = _read(_omegaconf().load, path)
        try:
            return cls.from_dict(values)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error

    @classmethod
    def from_args(cls: type[C], args: Sequence[str]) -> C:
        """Return the settings of arguments like "parallel.use_fsdp=true"; values are YAML.

        Of two arguments for one setting the last counts.
        """
        return cls.from_dict(_read(_omegaconf().from_dotlist, list(args)))

    @classmethod
    @functools.cache
    def _hints(cls) -> dict[str, Any]:
        """Return the fields' types by their names, in order."""
        hints = typing.get_type_hints(cls)
        return {name: hints[name] for name in cls.__dataclass_fields__}

    @classmethod
    @functools.cache
    def _template(cls) -> DictConfig:
        config: DictConfig = _omegaconf().structured(cls, flags={"allow_objects": True})
        return config

    def __setattr__(self, name: str, value: Any) -> None:
        """Check and set a field."""
        kind = type(self)
        if name not in kind._hints():
            raise AttributeError(f"{name} is no setting; there are {', '.join(kind._hints())}")
        if value is not getattr(kind, name, kind):  # the default
            value = _checked(kind, name, value)
        object.__setattr__(self, name, value)


@dataclass
class CheckpointConfig(Config):
    """The times at which the trainer writes checkpoints, beside the one at the end.

    Args:
        save_every_n_steps: the number of steps between checkpoints; None: only at the end.
        only_save_most_recent: remove older checkpoints.
        save_on_signal: after SIGTERM or SIGUSR1 on any rank, save after the step in progress and
            end all ranks with the exit status 75.
    """

    save_every_n_steps: int | None = field(
        default=None, metadata={"check": partial(integer, low=1)}
    )
    only_save_most_recent: bool = False
    save_on_signal: bool = True


@dataclass
class BaseTrainerConfig(Config):
    """The settings of a trainer.

    Args:
        name: of the run; required.
        exp_name: of the experiment, whose losses go to ``<exp_name>.jsonl``; by default the name.
        exp_dir: the folder of all files; required.
        log_dir_name: the folder of losses in ``exp_dir``.
        use_double_weight_precision: train parameters of float64; for torch modules.
        checkpoint: when to write checkpoints.
    """

    name: str = MISSING
    exp_name: str = EXP_NAME
    exp_dir: str = MISSING
    log_dir_name: str = "logs"
    use_double_weight_precision: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class ParallelConfig(Config):
    """The settings by which several processes train a model.

    Args:
        use_fsdp: shard parameters, gradients and the optimizer's state; False: every rank has all.
            Of a Sequential, the update is sharded.
        cpu_offload: let FSDP keep parameters and gradients on the CPU while they are not used.
            It has no effect on a module on the CPU, and must be False for a Sequential.
        sharding_strategy: what FSDP shards, and between which ranks; the enum, a name or a number.
            For a Sequential all but NO_SHARD are the same.
        sync_module_states: begin with the parameters and buffers of rank 0; False: the caller has
            made them equal. It must be True for a Sequential.
        timeout: the limit of every wait for other ranks, in seconds; if torch's default group is
            initialised before, that of the group counts.

    The others are arguments that `ddp` gives to torch's DistributedDataParallel. With ``use_fsdp``
    or for a Sequential they must be the defaults.

    Args:
        find_unused_parameters: find the parameters that the loss does not depend on, after each
            forward; no rank then waits for their gradients.
        gradient_as_bucket_view: make gradients views of the buckets that are exchanged.
        static_graph: the same parameters are used in each step.
        broadcast_buffers: copy rank 0's buffers at each forward; False: each rank has its own.
        bucket_cap_mb: the size of a bucket of gradients in MiB; None: torch's default.
    """

    use_fsdp: bool = False
    cpu_offload: bool = False
    sharding_strategy: ShardingStrategy = ShardingStrategy.HYBRID_SHARD
    sync_module_states: bool = True
    timeout: float = field(default=DEFAULT_TIMEOUT, metadata={"check": seconds})
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = field(default=None, metadata={"check": partial(integer, low=1)})

    @property
    def of_ddp(self) -> dict[str, Any]:
        """The settings of DistributedDataParallel that are not its defaults, by their names."""
        others = ("use_fsdp", "cpu_offload", "sharding_strategy", "sync_module_states", "timeout")
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {
            name: value
            for name, (value, default) in values.items()
            if name not in others and value != default
        }


def _read(load: Callable[[Any], Any], source: Any) -> dict[str, Any]:
    """Return settings with their interpolations resolved, without those that are `EXP_NAME`."""
    omegaconf = _omegaconf()
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        values = omegaconf.to_container(load(source))
        if not isinstance(values, dict):
            raise TypeError(f"{source}: expected names and values, got {values!r}")
        named = {str(name): value for name, value in values.items() if value != EXP_NAME}
        resolved = omegaconf.to_container(omegaconf.create(named), resolve=True)
    except YAMLError as error:
        raise ValueError(f"{source} is no YAML: {error}") from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{source}: {error.full_key}: {error.msg}") from error
    return typing.cast(dict[str, Any], resolved)


def _checked(kind: type[Config], name: str, value: Any) -> Any:
    """Return the value as the field keeps it."""
    hint = kind._hints()[name]
    if isinstance(hint, type) and issubclass(hint, Config) and isinstance(value, Mapping):
        try:
            return hint.from_dict(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}.{error}") from error
    if type(value) is not hint:  # Most values from code need no conversion.
        value = _converted(kind, name, value)
    check = kind.__dataclass_fields__[name].metadata.get("check")
    return value if check is None or value is None else check(name, value)


def _converted(kind: type[Config], name: str, value: Any) -> Any:
    """Return the value as OmegaConf converts it; turn its errors into TypeError or ValueError."""
    omegaconf, config = _omegaconf(), copy.deepcopy(kind._template())
    from omegaconf.errors import OmegaConfBaseException

    plain = value.item() if isinstance(value, np.generic) else value
    takes = _takes(kind._hints()[name])
    if takes == _TAKES[bool] and type(plain) is int and plain not in (0, 1):  # OmegaConf: True
        raise TypeError(f"{name} must be {takes}, got {value!r}")
    try:
        omegaconf.update(config, name, plain, merge=False)
        found = config[name]
    except OmegaConfBaseException as error:
        wrong = ValueError if takes.startswith("one of") and value is not None else TypeError
        raise wrong(f"{name} must be {takes}, got {value!r}") from error
    if isinstance(value, Config):
        return value
    return omegaconf.to_container(found) if omegaconf.is_config(found) else found


def _takes(kind: Any) -> str:
    """Return a text about the values that a field of a type takes."""
    options = typing.get_args(kind)
    if len(options) == 2 and type(None) in options:
        return _takes(next(option for option in options if option is not type(None)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(f"{member.name} ({member.value})" for member in kind)
    if isinstance(kind, type) and issubclass(kind, Config):
        return f"a {kind.__name__} or a mapping"
    return _TAKES.get(kind, str(kind))


def _omegaconf() -> type[OmegaConf]:
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise ImportError("settings need omegaconf: pip install '.[parallel]'") from error
    return OmegaConf
