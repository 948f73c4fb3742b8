"""What every layer can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.states import Deltas, States


@dataclass(slots=True)
class Gaussians:
    """The weights, or the biases, of a layer, and where its backward writes their deltas.

    All are float32 and flat; those on the CPU lie in the engine's and the communicator's memory.
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

    ``handle`` is the engine's object. Forward keeps what backward needs, of the last batch, when
    ``training``.
    """

    #: Whether forward keeps its output for backward, so that no activation may overwrite it.
    keeps_output = False
    #: What matrix products and convolutions are computed in; sums and all else are float32.
    dtype = torch.float32

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def input_size(self) -> int:
        """The number of elements of one sample of the input."""
        return int(self.handle.input_size)

    @abstractmethod
    def forward(self, states: States, training: bool) -> States:
        """Return the outputs; never changes its input."""

    @abstractmethod
    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Write the parameters' deltas; return the innovation of the input.

        ``deltas`` is the innovation of the output, and may be changed. The input's has been
        carried through the activation that made the input; without ``to_input`` it is not needed,
        and may be anything.
        """

    def parts(self) -> list[Layer]:
        """Return the layers inside, in the engine's order, that may have parameters."""
        return [self]

    def computed(self) -> list[Layer]:
        """Return who has computed the last batch, and computes its backward, in order."""
        return [self]

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on; layers with parameters override it."""
        raise TypeError(f"{type(self).__name__} has no parameters")
