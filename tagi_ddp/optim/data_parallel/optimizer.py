"""A torch optimizer whose steps are those of all ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.optim.data_parallel.updates import BlockingUpdates, LaggingUpdates, all_params

Guard = Callable[[], AbstractContextManager[None]]


class DataParallelOptimizer:
    """A torch optimizer whose steps are those of all ranks; give it to `DataParallel`.

    Schedulers are made for ``torch_optimizer``.

    Args:
        torch_optimizer: the optimizer, of a single evaluation a step.
        blocking: whether `step` waits for all ranks and updates at once; else the update comes with
            the next forward, so that ranks do not wait for one another. `DataParallel` sets it.

    Raises:
        TypeError: an argument is of a wrong type, or the optimizer needs a closure.
    """

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
        self.blocking_parameter_updates = blocking
        self._updates: BlockingUpdates | LaggingUpdates | None = None
        self._guard: Guard = contextlib.nullcontext

    @property
    def update_next(self) -> bool:
        """Whether an update waits for the next forward."""
        return self._updates is not None and self._updates.pending

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

        A collective call. Until it a gradient is this rank's own. Where no rank has one for a
        parameter, that is left alone; where only some have, others count as zero.
        """
        if self._updates is None:
            raise RuntimeError("step() needs an open DataParallel that was given this optimizer")
        with self._guard():
            self._updates.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset this rank's gradients; an update that is not applied yet has its own."""
        self.torch_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's state, after the update that waits."""
        self.catch_up()
        return self.torch_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the torch optimizer's state, after the update that waits."""
        self.catch_up()
        self.torch_optimizer.load_state_dict(state_dict)

    def catch_up(self) -> None:
        """Make the update that waits for the next forward."""
        if self._updates is not None:
            with self._guard():
                self._updates.apply()

    @property
    def attached(self) -> bool:
        """Whether an open `DataParallel` has it."""
        return self._updates is not None

    def attach(self, updates: BlockingUpdates | LaggingUpdates, guard: Guard) -> None:
        """Let ``updates`` do what steps ask for, inside of ``guard``; for `DataParallel`."""
        self.blocking_parameter_updates = isinstance(updates, BlockingUpdates)
        self._updates, self._guard = updates, guard

    def detach(self) -> None:
        """Undo `attach`."""
        self._updates, self._guard = None, contextlib.nullcontext


def check_blocking(blocking: object) -> None:
    """Raise TypeError unless it is a bool."""
    if not isinstance(blocking, bool):
        raise TypeError(f"blocking must be a bool, got {blocking!r}")
