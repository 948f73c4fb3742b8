"""Reports of the errors of ranks, and small networks, wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.networks import fresh

from tagi_ddp import DDPSequential

Report = tuple[str, str, tuple[int, ...]]
NO_ERROR: Report = ("", "", ())


def report(call: Callable[[], Any]) -> Report:
    """Return the type, text and ranks of the error that a call raises."""
    found = report_if_any(call)
    assert found != NO_ERROR
    return found


def report_if_any(call: Callable[[], Any]) -> Report:
    """Do the same for a call that may raise none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    return NO_ERROR


def set_delta_variances(model: DDPSequential, handle: Any, values: list[float]) -> None:
    """Overwrite the deltas of a layer's weights' variances, wherever they are."""
    if model.compute.name == "engine":
        handle.delta_var_w = values
        return
    index = [layer.handle for layer in model._local.replica.layers].index(handle)
    offset, count = model._local.replica.parameters.blocks[2 * index]
    deltas = model.compute.bucket.reshape(2, -1)
    deltas[1, offset : offset + count] = values


def wrap(comm: Any, name: str = "mlp", **options: Any) -> DDPSequential:
    return DDPSequential(fresh(name), communicator=comm, **options)


def wrap_merging(comm: Any, name: str = "mlp", **options: Any) -> DDPSequential:
    """Wrap a network whose replicas train apart, and are merged by precision."""
    return wrap(comm, name, reduction="precision", **options)
