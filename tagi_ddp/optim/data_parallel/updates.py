"""Updates of parameters: in step() itself, or layer by layer in the next forward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tagi_ddp.communicators import Communicator
from tagi_ddp.optim.changes import Changes, Vote
from tagi_ddp.optim.chunks import mean_in_place, start_reduction
from tagi_ddp.optim.data_parallel.buckets import Round
from tagi_ddp.optim.models import all_params
from tagi_ddp.optim.sparse import no_rows, sparse_sum

_DENSE = 255  # The vote for a dense gradient; that for a sparse one is its sparse dimensions.


def buffers_of(module: nn.Module, communicator: Communicator) -> Changes:
    """Return the module's buffers of floats, equal on all ranks now; none in a world of one."""

    def buffers() -> list[Tensor]:
        found = module.buffers() if communicator.size > 1 else ()
        return [b for b in found if b.is_floating_point() or b.is_complex()]

    return Changes(buffers)


class BlockingUpdates:
    """Updates in `step`, which waits for the means of all ranks."""

    pending = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, communicator: Communicator, buffers: Changes
    ) -> None:
        """Update with ``optimizer``."""
        self._optimizer = optimizer
        self._communicator = communicator
        self._buffers = buffers

    def step(self, overflow: bool) -> None:
        """Average gradients and buffers; update the parameters unless a rank has ``overflow``."""
        if self._communicator.size > 1:
            any_overflow, *has_changed = self._average([overflow], self._buffers.flags())
            mean_in_place(compress(self._buffers.tensors(), has_changed), self._communicator)
            self._buffers.note(has_changed)
            overflow = bool(any_overflow)
        if not overflow:
            self._optimizer.step()

    def synchronize(self) -> None:
        """Average gradients."""
        if self._communicator.size > 1:
            self._average([], [])

    def _average(self, numbers: list[int], flags: list[Tensor]) -> list[int]:
        """Average gradients; return the votes on ``numbers`` and ``flags``."""
        params = all_params(self._optimizer)
        kinds = [_kind(param.grad) for param in params]
        votes = Vote([*kinds, *numbers], flags, self._communicator).result()
        dense = []
        for param, kind in zip(params, votes, strict=False):
            if kind == _DENSE:
                dense.append(_dense_gradient(param))
            elif kind:
                param.grad = sparse_sum(_sparse_gradient(param, kind), self._communicator)
                param.grad /= self._communicator.size
        mean_in_place(dense, self._communicator)
        return votes[len(params) :]

    def apply(self, params: Iterable[Tensor] | None = None) -> None:
        """Do nothing: no update is ever pending."""

    def close(self) -> None:
        """Do nothing."""


class LaggingUpdates:
    """Updates that `step` records and the next forward applies.

    Args:
        optimizer: makes the updates.
        communicator: for these updates only, because ranks use it at different times.
        buffers: of the module.
        overlap: whether reductions start during backward; else in `step`.
        hook: is called with each parameter whose gradient backward has written; calls `ready`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        buffers: Changes,
        overlap: bool,
        hook: Callable[[Tensor], None],
    ) -> None:
        """Prepare for the first backward."""
        self._optimizer = optimizer
        self._communicator = communicator
        self._buffers = buffers
        self._overlap = overlap and communicator.size > 1
        self._hook = hook
        self._hooked: dict[Tensor, RemovableHandle] = {}
        self._lock = threading.Lock()  # Backward runs on one thread for each device.
        self._update: _Update | None = None
        self._begin(early=self._overlap)

    @property
    def pending(self) -> bool:
        """True if a step has not been applied in full."""
        return self._update is not None

    def ready(self, param: Tensor) -> None:
        """Record that backward has written a gradient."""
        with self._lock:
            self._round.ready(param)

    def step(self, overflow: bool) -> None:
        """Record gradients, buffers and settings; if a rank has ``overflow``, skip the update."""
        self.apply()  # The last step may have had no forward after it.
        changed = self._round.finish(self._trainable())
        self._update = _Update(
            self._optimizer, self._communicator, self._buffers, self._round, changed, overflow
        )
        # A scheduler checks this, and may step before the update.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._begin(early=False)  # `apply` sets it once it knows that no rank changed gradients.

    def apply(self, params: Iterable[Tensor] | None = None) -> None:
        """Apply the recorded step, if there is one, to ``params``; None: to all that remain."""
        update = self._update
        if update is None:
            return
        if not update.reduced:
            if update.wait():  # Changed gradients must be reduced a second time.
                self._overlap = False
                warnings.warn(
                    "gradients were changed between backward and step, by clipping or another "
                    "backward: from now on step() reduces them, not backward",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._round.early = self._overlap
        update.apply(params)
        if not update.left:
            self._update = None

    def begin_again(self) -> None:
        """Begin a new round if parameters have been cast, on all ranks; no update is pending."""
        if not self._round.cast():
            return
        if self._round.early:
            self._round.finish(())  # Other ranks may have started these; a step reduces again.
        self._begin(self._round.early)

    def close(self) -> None:
        """Drop the recorded step, and remove the hooks."""
        self._update = None
        while self._hooked:
            self._hooked.popitem()[1].remove()

    def _begin(self, early: bool) -> None:
        params = self._trainable()
        for param in params:
            if param not in self._hooked:
                self._hooked[param] = param.register_post_accumulate_grad_hook(self._hook)
        self._round = Round(params, self._communicator, early)

    def _trainable(self) -> list[Tensor]:
        return [param for param in all_params(self._optimizer) if param.requires_grad]


class _Update:
    """A recorded step. Ranks may wait for its results at different times, or never."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        buffers: Changes,
        gradients: Round,
        changed: Tensor,
        overflow: bool,
    ) -> None:
        self.reduced = False
        self.left: dict[Tensor, Tensor] = {}  # Mean gradients of parameters that are not updated.
        self._optimizer = optimizer
        self._groups = [_copied(group) for group in optimizer.param_groups]
        self._gradients = gradients
        self._buffers = buffers
        self._averaged = buffers.tensors()
        self._buffer_means = [buffer.clone() for buffer in self._averaged]
        self._buffer_reduction = start_reduction(self._buffer_means, communicator)
        has = [p.grad is not None for bucket in gradients.buckets for p in bucket.params]
        self._vote = Vote([overflow, *has], [changed, *buffers.flags()], communicator)

    def wait(self) -> bool:
        """Wait for the reductions; return whether any rank's gradients had changed."""
        overflow, *flags = self._vote.result()
        count = sum(len(bucket.params) for bucket in self._gradients.buckets)
        has_gradient, changed, has_changed = flags[:count], flags[count], flags[count + 1 :]
        if changed:
            self._gradients.again()
        means = [pair for bucket in self._gradients.buckets for pair in bucket.means()]
        self.left = {} if overflow else dict(compress(means, has_gradient))
        self._buffer_reduction.wait()
        pairs = zip(self._averaged, self._buffer_means, strict=True)
        with torch.inference_mode(False), torch.no_grad():
            for buffer, mean in compress(pairs, has_changed):
                buffer.copy_(mean)
        self._buffers.note(has_changed)
        self.reduced = True
        return bool(changed)

    def apply(self, params: Iterable[Tensor] | None) -> None:
        """Update ``params`` and no others by the optimizer, with the settings of the step."""
        chosen = [p for p in (list(self.left) if params is None else params) if p in self.left]
        if not chosen:
            return
        own_groups, own_gradients = self._optimizer.param_groups, [p.grad for p in chosen]
        within = set(chosen)
        groups = [{**g, "params": [p for p in g["params"] if p in within]} for g in self._groups]
        try:
            for param in chosen:
                param.grad = self.left.pop(param).to(param.device)
            self._optimizer.param_groups = [group for group in groups if group["params"]]
            with torch.inference_mode(False):  # The optimizer's state outlives this forward.
                self._optimizer.step()
        finally:
            self._optimizer.param_groups = own_groups
            for param, gradient in zip(chosen, own_gradients, strict=True):
                param.grad = gradient


def _kind(gradient: Tensor | None) -> int:
    """Return the vote for a layout, of which the ranks take the greatest; 0: no gradient."""
    if gradient is None:
        return 0
    return gradient.sparse_dim() if gradient.is_sparse else _DENSE


def _dense_gradient(param: Tensor) -> Tensor:
    """Return the gradient, made of zeros if only other ranks have one."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    elif param.grad.is_sparse:
        param.grad = param.grad.to_dense()
    return param.grad


def _sparse_gradient(param: Tensor, sparse_dim: int) -> Tensor:
    """Return the gradient, of no rows if only other ranks have one."""
    if param.grad is None:
        return no_rows(param, sparse_dim)
    if param.grad.sparse_dim() == sparse_dim:
        return param.grad
    return param.grad.to_dense().to_sparse(sparse_dim)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group, whose settings a scheduler may change in place."""
    copied = {name: v.clone() if isinstance(v, Tensor) else v for name, v in group.items()}
    return {**copied, "params": list(group["params"])}
