"""LSTM layers that carry their states from step to step of a sample, as later engines do."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp.compute.lstm import LSTM, Recurrent
from tagi_ddp.compute.states import Deltas, States
from tagi_ddp.engine.options import returns_last_step


class RecurrentLSTM(LSTM):
    """A row of the inputs is a step, [batch * steps, inputs].

    A sample begins with states of zero. Only batches of one sample and one step continue from the
    batch before; as in the engine, their states are not corrected by the innovation.
    """

    @property
    def input_size(self) -> int:
        """The number of elements of one row of the input."""
        return self._inputs

    def forward(self, states: States, training: bool) -> States:
        """Compute one step after the other."""
        mean, variance = states.viewed(self._inputs)
        batch = len(mean) // self._steps
        if batch != self._batch:
            self._batch, self._recurrent = batch, None
        before = self._recurrent
        if not self._is_single():
            self._recurrent = None
        outputs, self._steps_saved = [], []
        for step in range(self._steps):
            rows = slice(step, None, self._steps)
            spread = None if variance is None else variance[rows]
            hidden, cells, saved = self._compute(mean[rows], spread, training)
            self._recurrent = Recurrent(hidden, cells)
            outputs.append(hidden)
            self._steps_saved.append(saved)
        if not self._is_single():
            self._recurrent = before
        self._only_last = returns_last_step(self.handle)
        kept = outputs[-1:] if self._only_last else outputs
        return States(
            torch.stack([one.mean for one in kept], 1).flatten(0, 1),
            torch.stack([one.variance for one in kept], 1).flatten(0, 1),
        )

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Write the deltas, from the last step to the first: h' passes its innovation on."""
        weights, biases = self._weights, self._biases
        for part in (weights, biases):
            if part is not None:
                part.delta_mu.zero_()
                part.delta_var.zero_()
        shape = len(deltas.mean) // (1 if self._only_last else self._steps), -1, self._outputs
        own_mean, own_variance = deltas.mean.view(shape), deltas.variance.view(shape)
        back: tuple[Tensor, Tensor] | None = None
        below: list[tuple[Tensor, Tensor]] = []
        for step, saved in reversed(list(enumerate(self._steps_saved))):
            assert saved is not None
            mean = torch.zeros_like(own_mean[:, 0])
            variance = torch.zeros_like(mean)
            if not self._only_last or step == self._steps - 1:
                at = -1 if self._only_last else step
                mean, variance = own_mean[:, at].clone(), own_variance[:, at].clone()
            if back is not None:
                mean += back[0]
                variance += back[1]
            mean_delta, variance_delta = mean.t().contiguous(), variance.t().contiguous()
            slopes, inputs = saved.hidden_by_sums, saved.inputs
            by_mean = slopes * mean_delta
            by_variance = (slopes * slopes).mul_(variance_delta)
            rows, columns = slice((4 - len(slopes)) * self._outputs, None), inputs.shape[1]
            mean_rows, variance_rows = by_mean.flatten(0, 1), by_variance.flatten(0, 1)
            weights.delta_mu[rows, :columns].addmm_(mean_rows, inputs)
            weights.delta_var[rows, :columns].addmm_(variance_rows, inputs * inputs)
            if biases is not None:
                biases.delta_mu[rows] += mean_rows.sum(1, keepdim=True)
                biases.delta_var[rows] += variance_rows.sum(1, keepdim=True)
            of_inputs = weights.mu[rows, :columns]
            both = (
                mean_rows.t() @ of_inputs,
                self._variance_below(slopes, by_variance, variance_delta, of_inputs),
            )
            below.append((both[0][:, : self._inputs], both[1][:, : self._inputs]))
            if step:
                back = both[0][:, self._inputs :], both[1][:, self._inputs :]
        weights.scale_deltas()
        if biases is not None:
            biases.scale_deltas()
        if not to_input:
            return deltas
        means, variances = zip(*reversed(below), strict=True)
        return Deltas(torch.stack(means, 1).flatten(0, 1), torch.stack(variances, 1).flatten(0, 1))
