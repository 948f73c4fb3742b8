"""Who runs a replica's forward and backward: the engine's kernels, or torch's."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any, Literal

from tagi_ddp.compute.interface import Choice, Compute, Precision
from tagi_ddp.engine.buffers import FloatArray, verify_buffers
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.replica.protocol import Replica


def choose(
    model: Any, replica: Replica, choice: Choice, device: str, precision: Precision
) -> Literal["engine", "torch"]:
    """Return who computes ``model``.

    "auto" takes torch if it is installed and knows every layer; if not, the engine, with a warning
    that says why. Raises ValueError when "torch" is asked for and cannot be had.
    """
    if choice not in ("auto", "engine", "torch"):
        raise ValueError(f'compute is {choice!r}; use "auto", "engine" or "torch"')
    if precision not in ("float32", "tf32", "bfloat16"):
        raise ValueError(f'precision is {precision!r}; use "float32", "tf32" or "bfloat16"')
    if str(model.device) != "cpu":
        return _engine_on_device(replica.device, choice, device, precision)
    if choice == "engine":
        if (device, precision) != ("cpu", "float32"):
            raise ValueError(
                f'compute="engine" runs on "cpu" in "float32", not on {device!r} in {precision!r}'
            )
        return "engine"
    reason = _why_not_torch(model, replica)
    if reason is None:
        _check_device(device)
        return "torch"
    if choice == "torch" or (device, precision) != ("cpu", "float32"):
        raise ValueError(
            f'torch cannot compute this network: {reason}; use compute="engine" on "cpu"'
        )
    warnings.warn(
        f"the engine computes this network on its own kernels, not torch: {reason}. "
        'compute="engine" asks for it without this warning.',
        RuntimeWarning,
        stacklevel=2,
    )
    return "engine"


def _engine_on_device(
    where: str, choice: Choice, device: str, precision: Precision
) -> Literal["engine"]:
    """Return "engine", which alone computes a model that is on a GPU."""
    if choice == "torch" or precision != "float32" or device not in ("cpu", where):
        raise ValueError(
            f"model is on {where}, where the engine computes it in float32; for "
            f"compute={choice!r}, device={device!r}, precision={precision!r} wrap it while it is "
            "on the CPU"
        )
    return "engine"


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        raise ValueError(f"device is {device!r}, which torch cannot use: {text}") from error


def _why_not_torch(model: Any, replica: Replica) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install 'tagi-ddp[torch]')"
    if not replica.in_place:
        return "the engine's memory cannot be used in place"
    try:
        verify_buffers()
    except LayoutError as error:
        return str(error)
    from tagi_ddp.compute.network import why_not

    return why_not(model)


def make_compute(
    name: Literal["engine", "torch"],
    model: Any,
    replica: Replica,
    bucket: FloatArray | None,
    device: str,
    precision: Precision,
) -> Compute:
    """Return who computes the replica ``model`` on ``device``, and writes its deltas to ``bucket``.

    The engine keeps them in its layers, and a replica on a device there: then ``bucket`` is None.
    """
    if name == "engine":
        from tagi_ddp.compute.on_engine import EngineCompute

        return EngineCompute(model, replica)
    from tagi_ddp.compute.on_torch import TorchCompute

    return TorchCompute(model, replica, bucket, device, precision)
