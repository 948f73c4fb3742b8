"""One torch module, trained by all ranks of a communicator."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tagi_ddp.communicators import Communicator, CommunicatorError, as_communicator
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.communicators.guard import Closing, abort, or_abort
from tagi_ddp.communicators.init import is_made_for
from tagi_ddp.optim.changes import Changes
from tagi_ddp.optim.chunks import broadcast_in_place
from tagi_ddp.optim.daso import DASO
from tagi_ddp.optim.data_parallel.optimizer import DataParallelOptimizer, check_blocking
from tagi_ddp.optim.data_parallel.updates import BlockingUpdates, LaggingUpdates, buffers_of
from tagi_ddp.optim.models import Wrapper, check_not_wrapped, compare_models, refuse_sparse

# The open DataParallel that wrapped each module last.
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DataParallel]] = (
    weakref.WeakKeyDictionary()
)


class DataParallel(Closing, Wrapper):
    """A module as one of the equal replicas of all ranks; a context manager.

    Each rank runs forward and backward on its own share of a batch, with a loss that is a mean over
    samples. A step of the optimizer uses the means of all ranks' gradients. Weights and buffers
    begin as rank 0's. Buffers of floats, like running statistics, are averaged at each step.

    A blocking step does what serial training on the union of equal shares does. A non-blocking step
    averages gradients while backward runs, and updates each layer in the next forward, just before
    it runs: one step late. If gradients are changed before the step, by clipping or a second
    backward, the changed ones count; later steps then average in `step`, after a warning. Reading
    parameters through this object, `eval`, `state_dict` and leaving the block apply a pending
    update first. Do not use a layer's parameters before it runs, unless it did not run in the
    last forward.

    An error on one rank is raised on the others too, at their next collective operation.

    Wrapping a module again, as when a notebook's cell runs twice, closes the former `DataParallel`.

    Args:
        module: the network; trained in place.
        comm: a communicator, a torch.distributed.ProcessGroup or an mpi4py communicator.
        optimizer: one or several, of different parameters.
        blocking: replaces the setting of the optimizers. An optimizer that is listed twice counts
            once, and makes this True, with a warning.
        blocking_parameter_updates: another name of ``blocking``, which it replaces unless None.

    Raises:
        TypeError, ValueError: naming the argument and what it got; on all ranks if the ranks'
            modules or arguments differ.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator | Any,
        optimizer: DataParallelOptimizer | Sequence[DataParallelOptimizer],
        blocking: bool = False,
        *,
        blocking_parameter_updates: bool | None = None,
    ) -> None:
        """Copy rank 0's parameters and buffers to all; a collective call."""
        super().__init__()
        self._parent: Communicator = as_communicator(comm)
        self._comm = self._parent
        self._groups = [self._parent]  # Errors of this rank abort these groups.
        own = is_made_for(self._parent, comm)
        self._own = [self._parent] if own else []  # `close` closes these.
        self._updates: list[BlockingUpdates | LaggingUpdates] = []
        self._handles: list[Any] = []
        self._ran: set[nn.Module] = set()  # Parts that ran in this forward, or in the last one.
        self._layered: set[Tensor] = set()  # Parameters of the parts that ran in the last forward.
        self._optimizers: list[DataParallelOptimizer] = []
        self._former: DataParallel | None = None
        self._closed = False
        try:
            named = blocking_parameter_updates
            self._check(module, optimizer, blocking if named is None else named)
            with self._or_abort():
                self._attach()
        except BaseException:
            self._close()
            raise

    def _check(self, module: Any, optimizer: Any, blocking: Any) -> None:
        """Keep the arguments if they are the same on all ranks."""
        remedy = "Give the same module, optimizer and blocking on all ranks."
        with all_or_none(self._parent, "the ranks' arguments", remedy) as same:
            check_blocking(blocking)
            self._optimizers, twice = _checked(optimizer)
            self.blocking = blocking or twice
            same("blocking", self.blocking)
            numbered = enumerate(self._optimizers)
            inner = {f"optimizer {number}": each.torch_optimizer for number, each in numbered}
            compare_models(same, "module", module, inner)
            self._former = _owner_of(module, self._optimizers)
            same("wrapped before", self._former is not None)
            check_not_wrapped("module", module)
            if not self.blocking:
                refuse_sparse("module", module, "give blocking=True, or sparse=False to the layer")
            own = set(module.parameters())
            if own and own.isdisjoint(p for each in self._optimizers for p in each.params_ref):
                raise ValueError(
                    "optimizer must hold parameters of module, got those of another model: make it "
                    "of module.parameters()"
                )
        self._modules["module"] = module

    @property
    def blocking_parameter_updates(self) -> bool:
        """True if a step waits for all ranks and updates at once; ``blocking``."""
        return self.blocking

    def _attach(self) -> None:
        module = self._inner
        if self._former is not None:
            with suppress(CommunicatorError):  # A lost group does no harm: rank 0's weights count.
                self._former.close()
            self._former = None
        if not self.blocking and not self._own and self._parent.size > 1:
            # Ranks start reductions at different times: they must not mix with the caller's.
            own = self._parent.split(0, self._parent.rank)
            assert own is not None  # This rank has a color.
            self._comm = own
            self._own.append(self._comm)
            self._groups.insert(0, self._comm)
        optimized = [p for optimizer in self._optimizers for p in optimizer.params_ref]
        tensors = dict.fromkeys([*module.parameters(), *module.buffers(), *optimized])
        broadcast_in_place(tensors, self._comm)
        buffers = buffers_of(module, self._comm)
        for optimizer in self._optimizers:
            updates = self._make_updates(optimizer.torch_optimizer, buffers)
            optimizer.attach(updates, partial(or_abort, self._groups))  # This does not hold self.
            self._updates.append(updates)
        if not self.blocking:
            self._hook(module)
        _owners[module] = weakref.ref(self)

    def _make_updates(
        self, optimizer: torch.optim.Optimizer, buffers: Changes
    ) -> BlockingUpdates | LaggingUpdates:
        if self.blocking:
            return BlockingUpdates(optimizer, self._comm, buffers)
        overlap = len(self._optimizers) == 1  # Several may step in any order.
        return LaggingUpdates(
            optimizer, self._comm, buffers, overlap, _Hook(self, "_after_gradient")
        )

    def _hook(self, root: nn.Module) -> None:
        # These hooks run before all others, which may compute with the parameters.
        for part in root.modules():
            if part is not root and any(True for _ in part.parameters(recurse=False)):
                hook = _Hook(self, "_before_part")
                self._handles.append(part.register_forward_pre_hook(hook, prepend=True))
        hook = _Hook(self, "_before_root")
        self._handles.append(root.register_forward_pre_hook(hook, prepend=True))
        self._handles.append(root.register_forward_hook(_Hook(self, "_after_root")))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's share of a batch."""
        with self._or_abort():
            return self._inner(*args, **kwargs)

    # --- the pending update -------------------------------------------------------------------

    def _before_root(self, root: nn.Module, args: Any) -> None:
        """Update the root's own parameters, and those of parts that may not run in this forward."""
        self._ran.clear()
        own = set(root.parameters(recurse=False))
        for optimizer, updates in zip(self._optimizers, self._updates, strict=True):
            if updates.pending:
                updates.apply(
                    [p for p in optimizer.params_ref if p in own or p not in self._layered]
                )

    def _before_part(self, part: nn.Module, args: Any) -> None:
        self._ran.add(part)
        for updates in self._updates:
            if updates.pending:
                updates.apply(part.parameters(recurse=False))

    def _after_root(self, root: nn.Module, args: Any, output: Any) -> None:
        for updates in self._updates:
            updates.apply()
        self._layered = {p for part in self._ran for p in part.parameters(recurse=False)}

    def _after_gradient(self, param: Tensor) -> None:
        with self._or_abort():
            for updates in self._updates:
                if isinstance(updates, LaggingUpdates):
                    updates.ready(param)

    def catch_up(self) -> None:
        """Apply the pending update, if there is one.

        After the first step whose gradients were changed between backward and the step, by clipping
        or a second backward, this waits for the other ranks to catch up too.
        """
        with self._or_abort():
            for updates in self._updates:
                updates.apply()

    @property
    def _inner(self) -> nn.Module:
        """The wrapped module, without catching up."""
        module = self._modules["module"]
        assert module is not None
        return module

    # --- reading and moving parameters --------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        self.catch_up()
        return self._inner

    def train(self, mode: bool = True) -> DataParallel:
        """Set the mode of training or, after catching up, of evaluation."""
        if not mode:
            self.catch_up()
        self._inner.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, after catching up; names begin with "module."."""
        self.catch_up()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` returned; the same on all ranks."""
        self.catch_up()
        return super().load_state_dict(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the wrapped module, after catching up."""
        self.catch_up()
        return super().named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return all modules, after catching up; torch finds parameters and buffers by this."""
        self.catch_up()
        named: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return named

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset this rank's gradients; a pending update keeps its own."""
        self._inner.zero_grad(set_to_none)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DataParallel:
        """Move or cast the module, as `to` and `double` ask for, after catching up."""
        super()._apply(fn, recurse)
        with self._or_abort():
            for updates in self._updates:
                if isinstance(updates, LaggingUpdates):
                    updates.begin_again()
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled, as communicators cannot be."""
        raise TypeError("a DataParallel cannot be copied or pickled: give its .module")

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Catch up and leave the group; the module stays usable on its own. May be called again."""
        if self._closed:
            return
        try:
            self.catch_up()
        finally:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._groups.clear()
        for optimizer, updates in zip(self._optimizers, self._updates, strict=False):
            optimizer.detach()
            updates.close()
        while self._handles:
            self._handles.pop().remove()
        while self._own:
            self._own.pop().close()

    def _or_abort(self) -> AbstractContextManager[None]:
        """Abort the groups if the block raises, so that no rank waits for this one."""
        return or_abort(self._groups)

    def _give_up(self, error: BaseException) -> None:
        abort(self._groups, error)
        self._close()  # A rank cannot catch up in an aborted group.


class _Hook:
    """A weak reference to a method of a `DataParallel`; copies of it do nothing."""

    def __init__(self, owner: DataParallel | None, name: str) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._name = name

    def __call__(self, *args: Any) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            getattr(owner, self._name)(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, str]]:
        return _Hook, (None, self._name)


def _checked(optimizer: Any) -> tuple[list[DataParallelOptimizer], bool]:
    """Return the optimizers as a list, each once, and whether any was listed twice."""
    if isinstance(optimizer, DASO):
        raise TypeError(
            "optimizer must be a DataParallelOptimizer or several, got DASO, which is for "
            "DataParallelMultiGPU(module, daso)"
        )
    optimizers = [optimizer] if isinstance(optimizer, DataParallelOptimizer) else optimizer
    if not isinstance(optimizers, Sequence) or isinstance(optimizers, str):
        got = type(optimizer).__name__
        raise TypeError(f"optimizer must be a DataParallelOptimizer or several, got {got}")
    for one in optimizers:
        if not isinstance(one, DataParallelOptimizer):
            got = type(one).__name__
            raise TypeError(f"optimizer must hold DataParallelOptimizers only, got {got}")
    if not optimizers:
        raise ValueError("optimizer must hold at least one DataParallelOptimizer, got none")
    once = list(dict.fromkeys(optimizers))
    params = [param for one in once for param in one.params_ref]
    if len(set(params)) < len(params):
        raise ValueError("optimizer must not hold a parameter twice")
    if twice := len(once) < len(optimizers):
        warnings.warn(
            "optimizer holds the same DataParallelOptimizer twice: it is used once, and blocking",
            stacklevel=4,
        )
    return once, twice


def _owner_of(
    module: nn.Module, optimizers: Sequence[DataParallelOptimizer]
) -> DataParallel | None:
    """Return the module's open DataParallel; ValueError if an optimizer belongs to another one."""
    known = _owners.get(module)
    owner = None if known is None else known()
    if owner is not None and owner._closed:
        owner = None
    own = [] if owner is None else owner._optimizers
    if any(one.attached and one not in own for one in optimizers):
        raise ValueError("optimizer belongs to another module's DataParallel; close that before")
    return owner
