"""States of random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

# Methods of generators other than numpy.random.Generator, and of modules with a global generator.
_METHODS = (
    ("getstate", "setstate"),  # random.Random, random
    ("get_state", "set_state"),  # torch.Generator, numpy.random.RandomState, numpy.random
    ("get_rng_state", "set_rng_state"),  # torch, torch.cuda
)
_GPU = "global cuda"


def global_generators(saved: Container[str] = ()) -> dict[str, Any]:
    """Return the modules with a global generator that this rank has now, by name.

    torch is among them once it is imported; torch.cuda, for the present GPU, once CUDA is in use,
    or if it is available and among ``saved``.
    """
    found = {"global python": random, "global numpy": np.random}
    if (torch := sys.modules.get("torch")) is not None:
        found["global torch"] = torch
        cuda = torch.cuda
        if cuda.is_initialized() or (_GPU in saved and cuda.is_available()):
            found[_GPU] = cuda
    return found


def states(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the global generators and of others, by name."""
    return {name: state_of(each) for name, each in {**global_generators(), **own}.items()}


def state_of(generator: Any) -> Any:
    """Return a state of numbers, text, arrays and tensors; TypeError for unknown generators."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return getattr(generator, _methods_of(generator)[0])()


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        getattr(generator, _methods_of(generator)[1])(state)


def check_state(name: str, generator: Any, state: Any) -> None:
    """Raise ValueError unless a generator can take a state; its own state is kept."""
    before = state_of(generator)
    try:
        set_state(generator, state)
    except Exception as error:
        raise ValueError(
            f"the generator {name!r} cannot go on from its state: {type(error).__name__}: {error}"
        ) from error
    finally:
        set_state(generator, before)


def _methods_of(generator: Any) -> tuple[str, str]:
    for names in _METHODS:
        if all(hasattr(generator, name) for name in names):
            return names
    raise TypeError(
        f"generators must be of numpy, torch or Python's random, got a {type(generator).__name__}"
    )
