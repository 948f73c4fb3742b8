"""Parts of a checkpoint: models, and objects with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tagi_ddp.checkpoint import generators as of_generators
from tagi_ddp.checkpoint.folder import Checkpoint
from tagi_ddp.checkpoint.module_states import state_of
from tagi_ddp.checkpoint.tree import check, equal, read_tree
from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.data import DistributedSampler
from tagi_ddp.environment import rank_and_size


@dataclass(frozen=True)
class Run:
    """The parts of a run and its generators, by name, and its sampler."""

    parts: Mapping[str, Any]
    sampler: DistributedSampler | None
    generators: Mapping[str, Any]

    def check(self) -> None:
        """Raise TypeError unless all can be saved."""
        for name, part in self.parts.items():
            check_part(name, part)
        for generator in self.generators.values():
            of_generators.state_of(generator)

    def settings(self) -> dict[str, Any]:
        """Return what the run that resumes must have in common with the one that saved."""
        return {
            "parts": sorted(self.parts),
            "sampler": None if self.sampler is None else self.sampler.settings,
            "generators": sorted(self.generators),
        }


def check_part(name: str, part: Any) -> None:
    """Raise TypeError unless it can be a part of a checkpoint."""
    if type(name) is not str or name.startswith("$"):
        raise TypeError(
            f"parts must have names that are text and do not begin with $, got {name!r}"
        )
    if has_run_state(part):
        return
    if hasattr(part, "_cpp_backend"):
        raise TypeError(
            f"{name} is a bare network: give what DDPSequential or accelerate has made of it"
        )
    if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
        raise TypeError(
            f"{name} is a {type(part).__name__}, which has no state_dict and load_state_dict"
        )
    check_held(name, part)


def check_held(name: str, part: Any) -> None:
    """Raise TypeError if a torch module or optimizer already holds something that cannot be saved.

    Lazy parameters are not checked, nor modules whose ``state_dict`` may wait for other ranks.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(part, torch.nn.Module):
        sharding = sys.modules.get("torch.distributed.fsdp")
        if type(part).state_dict is not torch.nn.Module.state_dict or (
            sharding is not None
            and any(isinstance(each, sharding.FullyShardedDataParallel) for each in part.modules())
        ):
            return
    elif getattr(type(part), "state_dict", None) is not torch.optim.Optimizer.state_dict:
        return
    for key, value in state_of(part).items():
        if not torch.nn.parameter.is_lazy(value):
            check({key: value}, f"parts/{name}")


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of parts by their names; a collective call."""
    return {
        name: part.run_state() if has_run_state(part) else state_of(part)
        for name, part in parts.items()
    }


def check_state(name: str, part: Any, state: Any) -> None:
    """Raise ValueError if a torch module would refuse a state after loading some of it.

    Modules with loading code or hooks of their own are not checked.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(part, torch.nn.Module):
        return
    plain, hooks = torch.nn.Module, ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    if type(part).load_state_dict is not plain.load_state_dict or any(
        (
            not type(module).__module__.startswith("torch.")
            and type(module)._load_from_state_dict is not plain._load_from_state_dict
        )
        or any(getattr(module, hook) for hook in hooks)
        for module in part.modules()
    ):
        return
    own = part.state_dict()
    if not isinstance(state, Mapping):
        raise ValueError(f"{name} is a {type(state).__name__} in what was saved, no state of it")
    if missing := own.keys() ^ state.keys():
        first = min(missing, key=str)
        where = "in this module" if first in own else "in what was saved"
        raise ValueError(f"{name} has {first} only {where}: give the module that was saved")
    for key, tensor in own.items():
        if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
            continue
        if not isinstance(state[key], torch.Tensor) or state[key].shape != tensor.shape:
            shape = tuple(getattr(state[key], "shape", ()))
            raise ValueError(
                f"{name} has {key} of the shape {tuple(tensor.shape)}, but {shape} was saved: give "
                "the module that was saved"
            )


def is_elastic(part: Any) -> bool:
    """Return whether a part is a model of an elastic job."""
    return has_run_state(part) and part.elastic


def has_run_state(part: Any) -> bool:
    """Return whether a part has a state for each rank, as models do."""
    return hasattr(type(part), "check_run_state")


def communicator_of(parts: Mapping[str, Any]) -> Communicator:
    """Return the first communicator of a part; ValueError if several ranks have none."""
    for part in parts.values():
        for name in ("communicator", "comm"):
            found = getattr(part, name, None)
            if isinstance(found, Communicator):
                return found
    if (size := rank_and_size()[1]) > 1:
        raise ValueError(f"communicator must be given: there are {size} ranks and no part has one")
    return SingleCommunicator()


# --- of the files of all ranks ----------------------------------------------------------------


def run_state_of(checkpoint: Checkpoint, part: str, rank: int, name: str) -> Any:
    """Return an entry of the ``run_state`` of a part on a rank."""
    return read_tree(checkpoint.file_of(rank), "parts", part, name)


def generators_of(checkpoint: Checkpoint, rank: int | None) -> dict[str, Any]:
    """Return the states of a rank's generators; without a rank, None for those that differ.

    The global generators that a rank saved depend on what it had imported.
    """
    ranks = range(checkpoint.ranks) if rank is None else [rank]
    first, *others = [read_tree(checkpoint.file_of(each), "generators") for each in ranks]
    same = (
        name
        for name, state in first.items()
        if all(name in other and equal(state, other[name]) for other in others)
    )
    return {**dict.fromkeys(first), **{name: first[name] for name in same}}


def entry_of(checkpoint: Checkpoint, rank: int | None, *path: str) -> Any:
    """Return an entry of a rank's file; without a rank, that of all, or None if they differ."""
    if rank is not None:
        return read_tree(checkpoint.file_of(rank), *path)
    first = read_tree(checkpoint.file_of(0), *path)
    others = (read_tree(checkpoint.file_of(r), *path) for r in range(1, checkpoint.ranks))
    return first if all(equal(first, other) for other in others) else None
