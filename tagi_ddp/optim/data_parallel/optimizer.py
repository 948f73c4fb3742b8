"""A torch optimizer that steps by the gradients of all ranks."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.optim.data_parallel.updates import BlockingUpdates, LaggingUpdates
from tagi_ddp.optim.models import all_params

Guard = Callable[[], AbstractContextManager[None]]


class DataParallelOptimizer:
    """A torch optimizer that steps by the gradients of all ranks; give it to `DataParallel`.

    Make schedulers for ``torch_optimizer``, and step a torch.amp.GradScaler with this. If it finds
    infinite or NaN gradients on one rank, all ranks skip the step.

    Args:
        torch_optimizer: an optimizer that evaluates the model once a step.
        blocking: whether `step` waits for all ranks and updates at once; else the next forward
            updates, and ranks do not wait for one another. `DataParallel` sets it.

    Raises:
        TypeError: an argument is of a wrong type, or the optimizer needs a closure.
    """

    # A GradScaler therefore calls `step` on every rank, after it has set grad_scale and found_inf.
    _step_supports_amp_scaling = True

    def __init__(self, torch_optimizer: torch.optim.Optimizer, blocking: bool = False) -> None:
        """Check the arguments."""
        if not isinstance(torch_optimizer, torch.optim.Optimizer):
            got = type(torch_optimizer).__name__
            raise TypeError(f"torch_optimizer must be a torch.optim.Optimizer, got {got}")
        check_blocking(blocking)
        closure = inspect.signature(type(torch_optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"torch_optimizer must step without a closure, but {type(torch_optimizer).__name__}"
                " needs one, to evaluate the model several times a step"
            )
        self.torch_optimizer = torch_optimizer
        self.blocking_parameter_updates: bool = blocking
        self._updates: weakref.ref[BlockingUpdates | LaggingUpdates] | None = None
        self._guard: Guard = nullcontext

    @property
    def update_next(self) -> bool:
        """True if an update is pending, for the next forward."""
        updates = self._attached
        return updates is not None and updates.pending

    @property
    def params_ref(self) -> list[Tensor]:
        """The parameters of all groups."""
        return all_params(self.torch_optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups."""
        return self.torch_optimizer.param_groups

    def step(self) -> None:
        """Update with the means of all ranks' gradients, now or in the next forward.

        A collective call. Until it, or `synchronize`, gradients are this rank's own. A parameter
        that has a gradient on no rank is left alone; if only some ranks have one, others count as
        zero.
        """
        updates = self._open("step")
        with self._guard():
            updates.step(self._overflow())

    def synchronize(self) -> None:
        """Replace this rank's gradients by the means of all ranks', before `step`.

        A collective call, for operations on the gradient of the whole batch, like clipping by its
        norm, and only with ``blocking=True``. `step` averages again: ranks stay equal even if they
        change their gradients differently.

        Raises RuntimeError: no open DataParallel has this optimizer, or it is non-blocking.
        """
        updates = self._open("synchronize")
        if not isinstance(updates, BlockingUpdates):
            raise RuntimeError(
                "synchronize() needs DataParallel(..., blocking=True): without it no step waits "
                "for the mean of all ranks' gradients"
            )
        with self._guard():
            updates.synchronize()

    def _open(self, name: str) -> BlockingUpdates | LaggingUpdates:
        updates = self._attached
        if updates is None:
            raise RuntimeError(f"{name}() needs an open DataParallel that has this optimizer")
        return updates

    def _overflow(self) -> bool:
        """Unscale the gradients for a GradScaler, if one steps; return whether it refuses them."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        scale = getattr(self, "grad_scale", None)
        gradients = [param.grad for param in self.params_ref if param.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a GradScaler needs parameters of float32, got some of float16")
        if scale is not None:  # Without a scale the caller has unscaled them.
            for gradient in gradients:
                gradient.detach().div_(float(scale))
        return bool(found)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset this rank's gradients; a pending update keeps its own."""
        self.torch_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's state, after catching up."""
        self.catch_up()
        return self.torch_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the torch optimizer's state, after catching up."""
        self.catch_up()
        self.torch_optimizer.load_state_dict(state_dict)

    def catch_up(self) -> None:
        """Apply the pending update, if there is one."""
        updates = self._attached
        if updates is not None:
            with self._guard():
                updates.apply()

    @property
    def attached(self) -> bool:
        """True if an open `DataParallel` has this optimizer."""
        return self._attached is not None

    @property
    def _attached(self) -> BlockingUpdates | LaggingUpdates | None:
        return None if self._updates is None else self._updates()

    def attach(self, updates: BlockingUpdates | LaggingUpdates, guard: Guard) -> None:
        """Make steps by ``updates``, not kept alive by this, in ``guard``; for `DataParallel`."""
        self.blocking_parameter_updates = isinstance(updates, BlockingUpdates)
        self._updates, self._guard = weakref.ref(updates), guard

    def detach(self) -> None:
        """Undo `attach`."""
        self._updates, self._guard = None, nullcontext


def check_blocking(blocking: object) -> None:
    """Raise TypeError unless it is a bool."""
    if not isinstance(blocking, bool):
        raise TypeError(f"blocking must be a bool, got {blocking!r}")
