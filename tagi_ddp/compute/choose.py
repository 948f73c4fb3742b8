"""The choice of a compute: the engine's kernels, the backend's, or torch's."""

from __future__ import annotations

import functools
import importlib.util
import logging
import warnings
from typing import Any, get_args

from tagi_ddp.compute import native
from tagi_ddp.compute.formulas import other_formulas
from tagi_ddp.compute.interface import Choice, Precision
from tagi_ddp.engine.buffers import verify_buffers
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.engine.series import SMOOTHING
from tagi_ddp.engine.shapes import input_rows
from tagi_ddp.replica import Replica

_NO_TORCH = "torch is not installed (pip install torch)"

log = logging.getLogger("tagi_ddp")


def choose(
    model: Any, replica: Replica, choice: Choice, device: str, precision: Precision
) -> Choice:
    """Return the compute for ``model``; "auto": native or torch, by the size of each batch.

    If only one of the two has kernels for every layer, "auto" returns that one; if neither has,
    "engine", with a warning that says why. Raises ValueError if ``choice`` is not available.
    """
    if choice not in get_args(Choice):
        raise ValueError(f'compute is {choice!r}; use "auto", "engine", "native" or "torch"')
    if precision not in ("float32", "tf32", "bfloat16"):
        raise ValueError(f'precision is {precision!r}; use "float32", "tf32" or "bfloat16"')
    default = (device, precision) == ("cpu", "float32")
    if choice in ("engine", "native") and not default:
        raise ValueError(
            f'compute="{choice}" is for the CPU in float32, but device is {device!r} and precision '
            f'{precision!r}: use compute="torch" for these'
        )
    if choice == "engine":
        return "engine"
    no_native = _why_not_native(model, replica) if default else "it runs on the CPU only"
    if choice == "native":
        if no_native is not None:
            raise ValueError(f"this network cannot be computed natively: {no_native}")
        return "native"
    no_torch = _why_not_torch(model, replica, no_native is None)
    if no_torch is None:
        if device != "cpu" and (reason := _why_not_device(device)) is not None:
            raise ValueError(f"device is {device!r}, which torch cannot use: {reason}")
        return "auto" if choice == "auto" and no_native is None else "torch"
    if choice == "torch" or not default:
        raise ValueError(
            f'torch cannot compute this network: {no_torch}; use compute="auto" on "cpu"'
        )
    if no_native is None:
        return "native"
    text = (
        f"the engine computes this network on its own kernels, not torch: {no_torch}. "
        'compute="engine" asks for it without this warning.'
    )
    if no_torch == _NO_TORCH:
        _note(text)
    else:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return "engine"


@functools.cache  # Each text is logged once in a process.
def _note(text: str) -> None:
    """Log a text that is no fault of the script: a warning could be turned into an error."""
    log.warning("%s", text)


def _why_not_native(model: Any, replica: Replica) -> str | None:
    """Return why the backend's kernels cannot compute the model, or None."""
    if (reason := _why_engine(model)) is not None:
        return reason
    try:
        native.build(model._cpp_backend.layers, replica, input_rows(model))
        verify_buffers()
    except (LayoutError, ValueError) as error:
        return str(error)
    return _why_other_formulas(model)


def _why_not_torch(model: Any, replica: Replica, natively: bool) -> str | None:
    """Return why torch cannot compute the model, or None.

    It imports torch, unless the backend's kernels can compute the model ``natively``.
    """
    if (reason := _why_engine(model)) is not None:
        return reason
    if importlib.util.find_spec("torch") is None:
        return _NO_TORCH
    if natively:
        only_native = {type(layer).__name__ for layer in model._cpp_backend.layers}
        only_native &= set(SMOOTHING)
        return f"torch does not compute {', '.join(sorted(only_native))}" if only_native else None
    if not replica.in_place:
        return "the engine's memory cannot be used in place"
    try:
        verify_buffers()
    except LayoutError as error:
        return str(error)
    from tagi_ddp.compute.network import why_not

    return why_not(model) or _why_other_formulas(model)


def _why_other_formulas(model: Any) -> str | None:
    """Return which layers the engine that is there computes otherwise than the kernels, or None."""
    other = other_formulas(model)
    return f"this engine computes {', '.join(other)} by another formula" if other else None


def _why_not_device(device: str) -> str | None:
    """Return why torch cannot use a device, or None."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def _why_engine(model: Any) -> str | None:
    """Return the reason if the model overrides a method that only the engine's compute calls."""
    from pytagi.nn import Sequential

    for name in ("forward", "backward"):
        if getattr(type(model), name, None) is not getattr(Sequential, name):
            return f"{type(model).__name__} has a {name}() of its own, which only the engine calls"
    return None
