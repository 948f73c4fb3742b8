"""The lower level of DASO: the ranks of a node train as one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.optim.chunks import broadcast_in_place, mean_in_place
from tagi_ddp.optim.daso.ranks import AllRanksRaise


class ModelsDiffer(AllRanksRaise, ValueError):
    """Ranks have models of different tensors."""


class Tensors:
    """The tensors of a model and its optimizer that ranks keep in step, each once.

    parameters: what is trained; frozen ones are left alone.
    floats, integers: the buffers.
    """

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        """Collect them; the optimizer may know parameters that the model does not."""
        known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        modules = () if model is None else (model,)
        named = [pair for module in modules for pair in module.named_parameters()]
        seen = {id(parameter) for _, parameter in named}
        named += [(f"parameter {i}", p) for i, p in enumerate(known) if id(p) not in seen]
        buffers = [pair for module in modules for pair in module.named_buffers()]
        self._named: list[tuple[str, Tensor]] = [*named, *buffers]
        self.parameters: list[Tensor] = [p for _, p in named if p.requires_grad]
        if any(parameter.is_complex() for parameter in self.parameters):
            raise TypeError("parameters must be real, got complex ones")
        self.floats = [buffer for _, buffer in buffers if buffer.is_floating_point()]
        self.integers = [buffer for _, buffer in buffers if not buffer.is_floating_point()]

    def begin(self, world: Communicator, limit: int) -> None:
        """Let all ranks have what rank 0 has, also where it is frozen; a collective call.

        Raises ValueError on all ranks if their models differ in more than numbers.
        """
        own = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in self._named]
        digest = hashlib.sha256(repr(own).encode()).digest()
        if len(set(all_gather_object(world, digest))) > 1:
            first, *others = all_gather_object(world, own)
            for rank, other in enumerate(others, 1):
                if other != first:
                    raise ModelsDiffer(_difference(first, rank, other))
        broadcast_in_place([tensor for _, tensor in self._named], world, 0, limit)


def _difference(first: list[Any], rank: int, other: list[Any]) -> str:
    for ours, theirs in zip(first, other, strict=False):
        if ours != theirs:
            return f"models differ between ranks: rank 0 has {ours}, rank {rank} has {theirs}"
    return f"models differ between ranks: rank 0 has {len(first)} tensors, rank {rank} {len(other)}"


class Node:
    """The ranks of one node.

    Args:
        communicator: of them.
        tensors: of this rank.
        limit: the largest number of elements of one operation.
    """

    def __init__(self, communicator: Communicator, tensors: Tensors, limit: int) -> None:
        """Remember them."""
        self._communicator = communicator
        self._tensors = tensors
        self._limit = limit

    def complete_gradients(self) -> list[Tensor]:
        """Return the gradients, zeros where only other ranks have one.

        Raises TypeError on all ranks of the node if one has a sparse gradient.
        """
        parameters = self._tensors.parameters
        if self._communicator.size > 1:
            kinds = torch.tensor([_kind(p.grad) for p in parameters], dtype=torch.int8)
            kinds = kinds.to(self._communicator.device)
            self._communicator.all_reduce(kinds, "max")
            for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
                if kind == _SPARSE:
                    raise TypeError("gradients must be dense, got a sparse one: give sparse=False")
                if kind == _DENSE and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Average them and the floating-point buffers; other buffers are the first rank's."""
        if self._communicator.size > 1:
            mean_in_place([*gradients, *self._tensors.floats], self._communicator, self._limit)
            broadcast_in_place(self._tensors.integers, self._communicator, 0, self._limit)

    def average_parameters(self) -> None:
        """Average what the ranks have made of the parameters, each alone."""
        mean_in_place(self._tensors.parameters, self._communicator, self._limit)


_DENSE, _SPARSE = 1, 2


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    return _SPARSE if gradient.is_sparse else _DENSE
