"""Settings that check themselves, from code, a mapping, YAML or a command line."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union

from torch.distributed.fsdp import ShardingStrategy

from tagi_ddp.checks import integer, real

C = TypeVar("C", bound="Config")

MISSING = "???"  # of a field that must be given


class Config:
    """Base of dataclasses whose fields are checked when they are made and when they are changed.

    Fields of type bool, int, float, str, an enum, one of these or None, and nested configurations
    are checked; an enum takes its members, their names and their numbers, a nested configuration a
    mapping too. ``metadata={"low": 1}`` of an integer's field is the least that it takes.

    Raises TypeError or ValueError that names the field, what it got and what it takes.
    """

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """Return the settings of a mapping, nested ones from nested mappings."""
        known = _hints(cls)
        for name in values:
            if name not in known:
                raise ValueError(f"{name} is no setting; there are {', '.join(known)}")
        return cls(**values)

    @classmethod
    def from_yaml(cls: type[C], path: str | Path) -> C:
        """Return the settings of a YAML file; the errors name the file, too."""
        yaml = _yaml()
        try:
            values = yaml.safe_load(Path(path).read_text())
            if not isinstance(values, Mapping | None):
                raise TypeError(f"expected names and values, got {values!r}")
            return cls.from_dict(values or {})
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML: {error}") from error
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error

    @classmethod
    def from_args(cls: type[C], args: Sequence[str]) -> C:
        """Return the settings of arguments like "parallel.use_fsdp=true"; values are YAML.

        Of two arguments for one setting the last counts.
        """
        yaml = _yaml()
        values: dict[str, Any] = {}
        for arg in args:
            path, equals, text = arg.partition("=")
            if not equals:
                raise ValueError(f"an argument must be name=value, got {arg!r}")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{path} must be YAML, got {text!r}: {error}") from error
            *parents, name = path.split(".")
            place = values
            for parent in parents:
                if not isinstance(place.setdefault(parent, {}), dict):
                    raise ValueError(f"{arg!r}: {parent} has a value already")
                place = place[parent]
            place[name] = value
        return cls.from_dict(values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check and set a field."""
        hints = _hints(type(self))
        if name not in hints:
            raise AttributeError(f"{name} is no setting; there are {', '.join(hints)}")
        value = _checked(name, hints[name], value)
        low = _lows(type(self)).get(name)
        if low is not None and value is not None:
            integer(name, value, low)
        object.__setattr__(self, name, value)


@dataclass
class ParallelConfig(Config):
    """How a model is trained by several processes.

    Args:
        use_fsdp: shard parameters, gradients and the optimizer's state; False: every rank has all.
            Of a Sequential, the update is sharded.
        cpu_offload: let FSDP keep parameters and gradients on the CPU while they are not used.
            They are there anyway if the module is; a Sequential has no such thing.
        sharding_strategy: what FSDP shards, and between which ranks; the enum, a name or a number.
            A Sequential knows two: NO_SHARD, and all others.
        sync_module_states: begin with the parameters and buffers of rank 0; False: the caller has
            made them equal. A Sequential always begins so.
    """

    use_fsdp: bool = False
    cpu_offload: bool = False
    sharding_strategy: ShardingStrategy = ShardingStrategy.HYBRID_SHARD
    sync_module_states: bool = True


def _checked(name: str, hint: Any, value: Any) -> Any:
    """Return the value as the field keeps it."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is Union:
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        others = [option for option in options if option is not type(None)]
        return _checked(name, others[0], value) if len(others) == 1 else value
    if hint is int:
        return integer(name, value)
    if hint is float:
        return real(name, value)
    if hint in (bool, str):
        if not isinstance(value, hint):
            takes = "true or false" if hint is bool else "a string"
            raise TypeError(f"{name} must be {takes}, got {value!r}")
        return value
    if not isinstance(hint, type):
        return value
    if issubclass(hint, Enum):
        return _member(name, hint, value)
    if issubclass(hint, Config) and not isinstance(value, hint):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a {hint.__name__} or a mapping, got {value!r}")
        try:
            return hint.from_dict(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}.{error}") from error
    return value


def _member(name: str, kind: type[Enum], value: Any) -> Enum:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if isinstance(value, int) and not isinstance(value, bool):
        for member in kind:
            if member.value == value:
                return member
    takes = ", ".join(f"{member.name} ({member.value})" for member in kind)
    raise ValueError(f"{name} must be one of {takes}, got {value!r}")


@functools.cache
def _hints(kind: type[Config]) -> dict[str, Any]:
    """Return the fields' types by their names, in order."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}  # type: ignore[arg-type]


@functools.cache
def _lows(kind: type[Config]) -> dict[str, int]:
    found = fields(kind)  # type: ignore[arg-type]
    return {field.name: field.metadata["low"] for field in found if "low" in field.metadata}


def _yaml() -> types.ModuleType:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "reading settings needs PyYAML: pip install 'tagi-ddp[parallel]'"
        ) from error
    return yaml
