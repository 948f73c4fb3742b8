"""Runs of linear layers, with activations between, in a network that torch computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, from_numpy

from tagi_ddp.checks import FLOAT32
from tagi_ddp.compute import native
from tagi_ddp.compute.activations import Activation
from tagi_ddp.compute.blocks import Chain
from tagi_ddp.compute.layer import Layer
from tagi_ddp.compute.linear import Linear
from tagi_ddp.compute.states import Deltas, States, scale
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica import Replica


class LinearRun(Chain):
    """A chain that computes small batches by the backend's kernels.

    Of these most of torch's time is the start of its operations. The parameters are the replica's,
    in the engine's memory. Deltas are written to the memory that `Parameters.place_deltas` has set.
    """

    def __init__(self, layers: Sequence[Layer], replica: Replica) -> None:
        super().__init__(None, layers)
        handles = [layer.handle for layer in layers]
        self._kernels = native.build(handles, replica)
        self._limit = native.limit(handles, replica)
        self._saved: States | None = None  # the inputs, if the kernels computed the batch

    def computed(self) -> list[Layer]:
        """Return this object if the kernels computed the last batch, else the layers."""
        return self.layers if self._saved is None else [self]

    def forward(self, states: States, training: bool) -> States:
        """Call each layer in turn, or the kernels for all."""
        mean, variance = states.viewed(self._kernels.input_size)
        samples = len(mean)
        self._saved = None
        if not 0 < samples <= self._limit:
            return super().forward(states, training)
        self._saved = States(mean, None, states.jacobian)
        shape = samples, self._kernels.output_size
        out_mean, out_variance = np.empty(shape, FLOAT32), np.empty(shape, FLOAT32)
        spread = None if variance is None else _array(variance)
        self._kernels.forward(_array(mean), spread, None, training, out_mean, out_variance)
        return States(from_numpy(out_mean), from_numpy(out_variance))

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Write the deltas of all layers, by the kernels."""
        saved = self._saved
        assert saved is not None
        self._kernels.set_innovation(_array(deltas.mean), _array(deltas.variance))
        self._kernels.backward(to_input)
        if not to_input:
            return deltas
        below = saved.mean.new_empty(2, *saved.mean.shape)
        self._kernels.read_input_innovation(*below.numpy())
        return scale(saved.jacobian, Deltas(*below))


def with_runs(layers: Sequence[Layer], replica: Replica) -> list[Layer]:
    """Return the layers, with each run that the kernels can compute joined into a `LinearRun`."""
    result: list[Layer] = []
    run: list[Layer] = []

    def end_run() -> None:
        last = max((i for i, layer in enumerate(run) if isinstance(layer, Linear)), default=-1)
        if last >= 0:
            result.append(LinearRun(run[: last + 1], replica))
        result.extend(run[last + 1 :])
        run.clear()

    for layer in layers:
        if isinstance(layer, Linear) or (run and isinstance(layer, Activation)):
            run.append(layer)
        else:
            end_run()
            result.append(layer)
    end_run()
    return result


def _array(tensor: Tensor) -> FloatArray:
    array: FloatArray = tensor.contiguous().numpy()
    return array
