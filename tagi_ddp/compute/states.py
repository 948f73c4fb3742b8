"""The values that layers exchange: Gaussians forward, innovations backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Jacobian(Protocol):
    """The derivative of an activation's output mean by its input mean, for each element."""

    def scale(self, deltas: Deltas) -> Deltas:
        """Propagate an innovation back through the activation; may change it in place."""
        ...

    def tensor(self) -> Tensor:
        """Return the derivative in float32, in the activation's shape."""
        ...


@dataclass(slots=True)
class States:
    """Independent Gaussians: the inputs or outputs of a layer, [batch, ...]."""

    mean: Tensor
    variance: Tensor | None  # None: exact
    jacobian: Jacobian | None = None  # of the activation that computed them; None: no activation

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self.mean.shape[0]

    def variance_tensor(self) -> Tensor:
        """Return the variance, zeros if exact."""
        return torch.zeros_like(self.mean) if self.variance is None else self.variance

    def jacobian_tensor(self) -> Tensor:
        """Return the activation's derivative, ones if there is no activation."""
        return torch.ones_like(self.mean) if self.jacobian is None else self.jacobian.tensor()

    def viewed(self, *shape: int) -> tuple[Tensor, Tensor | None]:
        """Return mean and variance as [batch, *shape]; raise ValueError for another size."""
        mean, variance = self.mean, self.variance
        if mean.shape[1:] == shape:
            return mean, variance
        require_inputs(math.prod(shape), mean)
        return (
            mean.reshape(-1, *shape),
            None if variance is None else variance.reshape(-1, *shape),
        )


def require_inputs(count: int, mean: Tensor) -> None:
    """Raise ValueError unless a sample of ``mean`` has ``count`` elements."""
    got = mean.shape[1:].numel()
    if got != count:
        raise ValueError(f"a layer takes {count} inputs, but the one before has {got} outputs")


@dataclass(slots=True)
class Deltas:
    """The innovation of Gaussians.

    The posterior of the prior N(mu, var) is N(mu + var * mean, var + var^2 * variance).
    """

    mean: Tensor
    variance: Tensor


@dataclass(slots=True)
class Dense:
    """A derivative that is stored as a tensor."""

    value: Tensor

    def scale(self, deltas: Deltas) -> Deltas:
        """Multiply the mean by the derivative, the variance by its square."""
        value = self.value.view_as(deltas.mean)
        deltas.mean.mul_(value)
        deltas.variance.mul_(value).mul_(value)
        return deltas

    def tensor(self) -> Tensor:
        """Return the derivative."""
        return self.value


@dataclass(slots=True)
class Rectified:
    """The derivative of a rectifier: 1 if the output is positive, else 0. It is not stored."""

    output: Tensor

    def scale(self, deltas: Deltas) -> Deltas:
        """Set the innovation of outputs that are not positive to zero."""
        output = self.output.view_as(deltas.mean)
        threshold = torch.ops.aten.threshold_backward
        threshold.grad_input(deltas.mean, output, 0.0, grad_input=deltas.mean)
        threshold.grad_input(deltas.variance, output, 0.0, grad_input=deltas.variance)
        return deltas

    def tensor(self) -> Tensor:
        """Return the derivative."""
        return (self.output > 0).float()


def scale(jacobian: Jacobian | None, deltas: Deltas) -> Deltas:
    """Propagate an innovation back through the activation; None leaves it as it is."""
    return deltas if jacobian is None else jacobian.scale(deltas)
