"""Activations: functions of each element's Gaussian, linearized at its mean.

An activation has no backward of its own: the layer above it carries innovations through its
jacobian.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Layer
from tagi_ddp.compute.states import Deltas, Rectified, States


class Activation(Layer):
    """A layer without parameters whose jacobian travels with its output."""

    #: Whether forward may overwrite its input, which nobody else needs.
    in_place = False

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Return the innovation as it is: it has been carried through already."""
        return deltas


class ReLU(Activation):
    """max(0, z): means and variances of negative means become 0."""

    keeps_output = True

    def forward(self, states: States, training: bool) -> States:
        """Rectify."""
        mean, variance = states.mean, states.variance
        mean = mean.relu_() if self.in_place else mean.relu()
        return States(mean, _where_positive(mean, variance, self.in_place), Rectified(mean))


def _where_positive(mean: Tensor, variance: Tensor | None, in_place: bool) -> Tensor | None:
    if variance is None:
        return None
    threshold = torch.ops.aten.threshold_backward
    if in_place:
        return threshold.grad_input(variance, mean, 0.0, grad_input=variance)
    return threshold(variance, mean, 0.0)
