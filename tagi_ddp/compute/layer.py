"""The interface of a layer, and its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.states import Deltas, States


@dataclass(slots=True)
class Gaussians:
    """The weights or the biases of a layer, and the memory for their deltas.

    All are float32 and flat. On the CPU they are in the engine's and the communicator's memory.
    """

    mu: Tensor
    var: Tensor
    delta_mu: Tensor
    delta_var: Tensor

    def viewed(self, *shape: int) -> Gaussians:
        """Return the same memory in another shape."""
        return Gaussians(
            self.mu.view(shape),
            self.var.view(shape),
            self.delta_mu.view(shape),
            self.delta_var.view(shape),
        )

    def scale_deltas(self) -> None:
        """Turn sums of innovations into deltas: mean by the variance, variance by its square."""
        self.delta_mu.mul_(self.var)
        self.delta_var.mul_(self.var).mul_(self.var)


class Layer(ABC):
    """A layer's forward and backward on tensors of means and variances.

    ``handle`` is the engine's object. If ``training``, forward keeps the values of the last batch
    that backward needs.
    """

    #: True if forward keeps its output for backward: then no activation may overwrite it.
    keeps_output = False
    #: The dtype of matrix products and convolutions; sums and all else are float32.
    dtype = torch.float32

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def input_size(self) -> int:
        """The number of elements of one sample of the input."""
        return int(self.handle.input_size)

    @abstractmethod
    def forward(self, states: States, training: bool) -> States:
        """Return the outputs; never change the inputs."""

    @abstractmethod
    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Write the parameters' deltas; return the innovation of the input.

        ``deltas`` is the innovation of the output, and may be changed. The input's is already
        multiplied by the jacobian of the activation before this layer. Without ``to_input`` it is
        not needed, and may be anything.
        """

    def parts(self) -> list[Layer]:
        """Return the layers inside that may have parameters, in the engine's order."""
        return [self]

    def computed(self) -> list[Layer]:
        """Return the layers that computed the last batch and compute its backward, in order."""
        return [self]

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on; layers with parameters override this method."""
        raise TypeError(f"{type(self).__name__} has no parameters")
