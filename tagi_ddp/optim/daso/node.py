"""The lower level of DASO: the ranks of a node train as one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from tagi_ddp.communicators import Communicator
from tagi_ddp.optim.changes import Changes, Vote
from tagi_ddp.optim.chunks import broadcast_in_place, mean_in_place
from tagi_ddp.optim.models import all_params, refuse_sparse


class Tensors:
    """The tensors of a model and its optimizer that ranks synchronize, each once.

    parameters: the optimizer's, without frozen ones.
    floats: the model's other trainable parameters, and its buffers of floats.
    integers: its other buffers.
    all: these, other parameters of both, and frozen ones.
    shapes: of all parameters of the optimizer, and of ``floats``, by name.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Collect them."""
        known = all_params(optimizer)
        numbers = {id(parameter) for parameter in known}
        named = list(model.named_parameters())
        buffers = list(model.named_buffers())
        others = [pair for pair in named if id(pair[1]) not in numbers]
        self.all = [*known, *(tensor for _, tensor in (*others, *buffers))]
        self.parameters: list[Tensor] = [p for p in known if p.requires_grad]
        self.floats: list[Tensor] = [p for _, p in others if p.requires_grad]
        self.floats += [buffer for _, buffer in buffers if buffer.is_floating_point()]
        self.integers = [buffer for _, buffer in buffers if not buffer.is_floating_point()]
        refuse_sparse("model", model, "give sparse=False to the layer")
        if any(tensor.is_complex() for tensor in (*self.parameters, *self.floats)):
            raise TypeError("parameters must be real, got complex ones")
        self.shapes = {
            f"parameter {number} of group {group}": list(parameter.shape)
            for group, settings in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(settings["params"])
        }
        for number, tensor in enumerate(self.floats):
            self.shapes[f"buffer or other parameter {number}"] = list(tensor.shape)


class Node:
    """The ranks of one node.

    Args:
        communicator: of these ranks.
        tensors: of this rank.
        limit: the largest number of elements of one operation.
    """

    def __init__(self, communicator: Communicator, tensors: Tensors, limit: int) -> None:
        """Begin with tensors that are equal on all ranks."""
        self._communicator = communicator
        self._tensors = tensors
        self._limit = limit
        floats = tensors.floats if communicator.size > 1 else []
        self._floats = Changes(lambda: floats)
        self._has_changed: list[int] = []

    def vote(self) -> list[Tensor]:
        """Vote on the tensors to average; return gradients, zeros if only other ranks have one.

        Raises TypeError on all ranks of the node if one has a sparse gradient.
        """
        parameters = self._tensors.parameters
        if self._communicator.size > 1:
            own = [_kind(parameter.grad) for parameter in parameters]
            kinds = Vote(own, self._floats.flags(), self._communicator).result()
            for parameter, kind in zip(parameters, kinds, strict=False):
                if kind == _SPARSE:
                    raise TypeError("gradients must be dense, got a sparse one: give sparse=False")
                if kind == _DENSE and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._has_changed = kinds[len(parameters) :]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Average gradients and changed tensors; buffers of integers become the first rank's."""
        if self._communicator.size > 1:
            changed = compress(self._tensors.floats, self._has_changed)
            mean_in_place([*gradients, *changed], self._communicator, self._limit)
            self._floats.note(self._has_changed)
            broadcast_in_place(self._tensors.integers, self._communicator, 0, self._limit)

    def average_parameters(self) -> None:
        """Average the parameters, after steps that ranks have made alone."""
        mean_in_place(self._tensors.parameters, self._communicator, self._limit)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that `Tensors.floats` had when they were last averaged."""
        return {"last": [last.clone() for last in self._floats.last]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for last, saved in zip(self._floats.last, state["last"], strict=True):
            last.copy_(saved)


_DENSE, _SPARSE = 1, 2


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    return _SPARSE if gradient.is_sparse else _DENSE
