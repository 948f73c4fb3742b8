"""States of torch modules by the names that they have without wrappers.

torch.compile adds "_orig_mod." to the names in a module, DistributedDataParallel and DataParallel
add "module.". A state without these prefixes loads into the module with any wrapper.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

_COMPILED = "_orig_mod."


def state_of(part: Any) -> Any:
    """Return ``part.state_dict()``, with a module's names as they are without wrappers."""
    state = part.state_dict()
    wrapped = _wrapped(part)
    return _renamed(state, lambda name: _bare(name, wrapped)) if wrapped else state


def fitted(part: Any, state: Any) -> Any:
    """Return a state of `state_of` or ``state_dict`` with the names that ``part`` has."""
    wrapped = _wrapped(part)
    if not isinstance(state, Mapping) or not (
        wrapped or any(_COMPILED in name for name in state if isinstance(name, str))
    ):
        return state
    prefixes = {prefix for prefix, _ in part.named_modules(remove_duplicate=False)}
    names = prefixes | set(part.state_dict())
    # A wrapper and its module have the same bare name; the longer name, the module's, is kept.
    own: dict[str, str] = {_bare(name, wrapped): name for name in sorted(names, key=len)}

    def name_of(name: str) -> str:
        if name in names and name != "":
            return name
        return own.get(name) or own.get(f"{name}.".replace(_COMPILED, "")[:-1], name)

    return _renamed(state, name_of)


def _wrapped(part: Any) -> list[str]:
    """Return the names, each with a dot, of the modules inside the wrappers of a part."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(part, torch.nn.Module):
        return []
    compiling = sys.modules.get("torch._dynamo.eval_frame")  # It is slow to import.
    kinds: dict[type, str] = {
        torch.nn.parallel.DistributedDataParallel: "module.",
        torch.nn.DataParallel: "module.",
    }
    if compiling is not None:
        kinds[compiling.OptimizedModule] = _COMPILED
    found = []
    for name, module in part.named_modules(remove_duplicate=False):
        for kind, inner in kinds.items():
            if isinstance(module, kind):
                found.append(f"{name}.{inner}" if name else inner)
    return sorted(found, key=len, reverse=True)  # the innermost first


def _bare(name: str, wrapped: list[str]) -> str:
    """Return a name without the prefixes of wrappers."""
    name += "."
    for prefix in wrapped:
        if name.startswith(prefix):
            outer = prefix[:-1].rpartition(".")[0]
            name = f"{outer}." * bool(outer) + name[len(prefix) :]
    return name[:-1]


def _renamed(state: Mapping[str, Any], name_of: Callable[[str], str]) -> Any:
    """Return a state with other names, also in its metadata, the versions of modules."""
    renamed: Any = OrderedDict((name_of(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed._metadata = OrderedDict((name_of(name), each) for name, each in versions.items())
    return renamed
