"""LSTM layers: c = f * c' + i * g and h = o * tanh(c) at each step, the gates linear in (x, h').

Source of the formulas: Vuong, Nguyen, Goulet, Coupling LSTM neural networks and state-space models
through analytically tractable inference, International Journal of Forecasting 41 (2025).

Engines differ in h' and c'. Here they are the states of the previous step only across batches of
one sample and one step. Otherwise, also within a sequence, they are zero or the values of
`LSTM.set_states`; `RecurrentLSTM` carries them through a sequence. So all steps of all samples are
computed at once, and the forget gate is left out if h' and c' are zero. Tensors are [gate, output,
row], so each gate is contiguous; a row is a step of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.states import Deltas, States
from tagi_ddp.engine.layers import lstm_steps

_CELL = 2  # The engine's order of the gates is forget, input, cell, output.


@dataclass(slots=True)
class _Gaussian:
    mean: Tensor
    variance: Tensor


@dataclass(slots=True)
class _Gate(_Gaussian):
    """A gate of all steps, and its derivative by its weighted sum; each [outputs, rows]."""

    slope: Tensor


@dataclass(slots=True)
class _Gates:
    """The gates f, i, g and o; f is None if there are no recurrent states.

    slopes: the derivatives of all gates, [gates, outputs, rows].
    """

    forget: _Gate | None
    input: _Gate
    cell: _Gate
    output: _Gate
    slopes: Tensor


@dataclass(slots=True)
class Recurrent:
    """The states h' and c' that the next batch uses, each [rows, outputs]."""

    hidden: _Gaussian
    cell: _Gaussian


@dataclass(slots=True)
class _Saved:
    """Values that backward needs: the gates' inputs, and derivatives of the outputs h."""

    inputs: Tensor  # [rows, x and, if there are recurrent states, h']
    hidden_by_sums: Tensor  # by the gates' sums, [gates, outputs, rows]
    hidden_by_cells: Tensor  # [outputs, rows]


class LSTM(Layer):
    """Weights are [gates, outputs, inputs + outputs]; inputs are [batch, steps * inputs]."""

    def __init__(self, handle: Any) -> None:
        """Read the sizes."""
        super().__init__(handle)
        self._inputs, self._outputs = int(handle.input_size), int(handle.output_size)
        self._steps = lstm_steps(handle)
        self._batch: int | None = None
        self._recurrent: Recurrent | None = None
        self._kept: tuple[int | None, Recurrent | None] = None, None
        self._saved: _Saved | None = None

    @property
    def input_size(self) -> int:
        """The number of elements of one sample of the input."""
        return self._steps * self._inputs

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on."""
        self._weights = weights.viewed(4 * self._outputs, self._inputs + self._outputs)
        self._biases = None if biases is None else biases.viewed(4 * self._outputs, 1)

    def reset_states(self) -> None:
        """Drop the hidden and cell states."""
        self._recurrent = None

    def get_states(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the recurrent states: means and variances of hidden, then of cell states.

        Each is [batch, steps * outputs], with the last batch's size; empty before the first batch.
        """
        recurrent = self._recurrent
        size = self._steps * self._outputs
        if recurrent is None:
            zeros = self._weights.mu.new_zeros(self._batch or 0, size)
            return zeros, zeros.clone(), zeros.clone(), zeros.clone()
        tensors = (
            recurrent.hidden.mean,
            recurrent.hidden.variance,
            recurrent.cell.mean,
            recurrent.cell.variance,
        )
        mu_h, var_h, mu_c, var_c = (tensor.reshape(-1, size).clone() for tensor in tensors)
        return mu_h, var_h, mu_c, var_c

    def keep(self) -> None:
        """Keep the recurrent states, without a copy: they are replaced and never written to."""
        self._kept = self._batch, self._recurrent

    def restore(self) -> None:
        """Restore the states that `keep` has kept."""
        self._batch, self._recurrent = self._kept

    def restore_if(self, refused: Tensor) -> bool:
        """Restore the states if ``refused`` is true; return False if their shapes have changed."""
        batch, kept = self._kept
        now = self._recurrent
        if kept is None or now is None or batch != self._batch:
            return kept is now and batch == self._batch
        for old, new in ((kept.hidden, now.hidden), (kept.cell, now.cell)):
            new.mean = torch.where(refused, old.mean, new.mean)
            new.variance = torch.where(refused, old.variance, new.variance)
        return True

    def set_states(
        self, mu_h: Tensor, var_h: Tensor, mu_c: Tensor, var_c: Tensor, batch: int | None = None
    ) -> None:
        """Use these states in the next batch, which must have ``batch`` samples.

        Each has the shape that `get_states` returns, or is flat; empty ones reset. ``batch`` None:
        the number of samples of the last batch. A batch of another size drops the states, and the
        first batch of all does too.
        """
        batch = self._batch if batch is None else batch
        has_states = any(tensor.numel() for tensor in (mu_h, var_h, mu_c, var_c))
        size = self._steps * self._outputs
        for name, tensor in zip(
            ("mu_h", "var_h", "mu_c", "var_c"), (mu_h, var_h, mu_c, var_c), strict=True
        ):
            if has_states and batch is not None and tensor.numel() != batch * size:
                raise ValueError(
                    f"{name} has {tensor.numel()} elements; give {batch} * {size}: the last "
                    "batch's samples by steps * outputs"
                )
        self._batch = batch
        if not any(bool(tensor.any()) for tensor in (mu_h, var_h, mu_c, var_c)):
            self.reset_states()  # Zeros are what get_states returns if there are no states.
            return
        like = self._weights.mu
        mu_h, var_h, mu_c, var_c = (
            tensor.to(like, copy=True).reshape(-1, self._outputs)
            for tensor in (mu_h, var_h, mu_c, var_c)
        )
        self._recurrent = Recurrent(_Gaussian(mu_h, var_h), _Gaussian(mu_c, var_c))

    def forward(self, states: States, training: bool) -> States:
        """Compute the gates, the cells and the outputs of all steps."""
        if states.batch != self._batch:
            self._batch, self._recurrent = states.batch, None
        mean, variance = states.viewed(self._steps, self._inputs)
        mean = mean.flatten(0, 1)
        variance = None if variance is None else variance.flatten(0, 1)
        result, cells, self._saved = self._compute(mean, variance, training)
        if self._is_single():
            own = _Gaussian(result.mean.clone(), result.variance.clone())
            self._recurrent = Recurrent(own, cells)
        shape = (states.batch, self._steps * self._outputs)
        return States(result.mean.view(shape), result.variance.view(shape))

    def _compute(
        self, mean: Tensor, variance: Tensor | None, training: bool
    ) -> tuple[_Gaussian, _Gaussian, _Saved | None]:
        """Return the outputs and the cells of rows, [rows, outputs], and what backward needs."""
        recurrent = self._recurrent
        if recurrent is not None:
            if variance is None:
                variance = torch.zeros_like(mean)
            mean = torch.cat((mean, recurrent.hidden.mean), 1)
            variance = torch.cat((variance, recurrent.hidden.variance), 1)
        gates = self._gates(mean, variance)
        between = None if variance is None else self._covariances(variance)
        cells, cells_by_sums = self._cells(gates, between)
        active, tanh_slope = _tanh(cells)
        # cov(o, tanh c) = o' tanh' sum of dc/dz cov(z, z_o), over the sums z of the other gates
        covariance = None
        if between is not None:
            covariance = between[1] * cells_by_sums[0]
            for one, cells_by_sum in zip(between[2:], cells_by_sums[1:], strict=True):
                covariance.addcmul_(one, cells_by_sum)
            covariance.mul_(tanh_slope).mul_(gates.output.slope)
        hidden = _product(gates.output, active, covariance)
        result = _Gaussian(hidden.mean.t().contiguous(), hidden.variance.t().contiguous())
        saved = None
        if training:
            hidden_by_cells = tanh_slope.mul_(gates.output.mean)
            hidden_by_sums = gates.slopes  # The slopes are not needed any more: use their memory.
            for cells_by_sum, hidden_by_sum in zip(cells_by_sums, hidden_by_sums, strict=False):
                torch.mul(cells_by_sum, hidden_by_cells, out=hidden_by_sum)
            hidden_by_sums[-1].mul_(active.mean)
            saved = _Saved(mean, hidden_by_sums, hidden_by_cells)
        return result, _Gaussian(cells.mean.t(), cells.variance.t()), saved

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Write the deltas of all gates; ignore the activation below, as the engine does."""
        saved = self._saved
        assert saved is not None
        outputs, inputs, slopes = self._outputs, saved.inputs, saved.hidden_by_sums
        gates = len(slopes)
        mean_delta = deltas.mean.view(-1, outputs).t().contiguous()
        variance_delta = deltas.variance.view(-1, outputs).t().contiguous()
        by_mean = slopes * mean_delta
        by_variance = (slopes * slopes).mul_(variance_delta)
        rows = slice((4 - gates) * outputs, None)
        columns = slice(inputs.shape[1])
        weights, biases = self._weights, self._biases
        mean_rows, variance_rows = by_mean.flatten(0, 1), by_variance.flatten(0, 1)
        if gates < 4:  # Without recurrent states the weights of f and h' have no innovation.
            weights.delta_mu.zero_()
            weights.delta_var.zero_()
        torch.mm(mean_rows, inputs, out=weights.delta_mu[rows, columns])
        torch.mm(variance_rows, inputs * inputs, out=weights.delta_var[rows, columns])
        weights.scale_deltas()
        if biases is not None:
            biases.delta_mu.zero_()
            biases.delta_var.zero_()
            torch.sum(mean_rows, 1, keepdim=True, out=biases.delta_mu[rows])
            torch.sum(variance_rows, 1, keepdim=True, out=biases.delta_var[rows])
            biases.scale_deltas()
        if self._is_single():
            self._update_recurrent(mean_delta, variance_delta, saved.hidden_by_cells)
        if not to_input:
            return deltas
        of_inputs = weights.mu[rows, : self._inputs]
        return Deltas(
            (mean_rows.t() @ of_inputs).view(-1, self.input_size),
            self._variance_below(slopes, by_variance, variance_delta, of_inputs).view(
                -1, self.input_size
            ),
        )

    def _cells(self, gates: _Gates, between: Tensor | None) -> tuple[_Gaussian, list[Tensor]]:
        """Return the cells c = f * c' + i * g, and their derivatives by the sums of f, i and g.

        ``between`` are the covariances of `_covariances`.
        """
        input_, cell = gates.input, gates.cell
        covariance = None
        if between is not None:
            covariance = between[0].mul_(input_.slope).mul_(cell.slope)
        cells = _product(input_, cell, covariance)
        by_sums = [input_.slope * cell.mean, cell.slope * input_.mean]
        if gates.forget is not None:
            assert self._recurrent is not None
            before = self._recurrent.cell
            before = _Gaussian(before.mean.t(), before.variance.t())
            kept = _product(gates.forget, before, None)
            cells.mean.add_(kept.mean)
            cells.variance.add_(kept.variance)
            by_sums.insert(0, gates.forget.slope * before.mean)
        return cells, by_sums

    def _gates(self, mean: Tensor, variance: Tensor | None) -> _Gates:
        """Return the gates, computed from the inputs x and, if there are recurrent states, h'."""
        count = 3 if self._recurrent is None else 4
        rows, columns = slice((4 - count) * self._outputs, None), slice(mean.shape[1])
        mu, var = self._weights.mu[rows, columns], self._weights.var[rows, columns]
        if self._biases is None:
            means, variances = mu @ mean.t(), var @ (mean * mean).t()
        else:
            means = torch.addmm(self._biases.mu[rows], mu, mean.t())
            variances = torch.addmm(self._biases.var[rows], var, (mean * mean).t())
        if variance is not None:
            variances.addmm_(torch.addcmul(var, mu, mu), variance.t())
        shape = (count, self._outputs, -1)
        means, variances = means.view(shape), variances.view(shape)
        cell = count - 4 + _CELL
        means[:cell].sigmoid_()
        means[cell].tanh_()
        means[cell + 1 :].sigmoid_()
        slopes = (1 - means).mul_(means)
        torch.mul(means[cell], means[cell], out=slopes[cell]).neg_().add_(1)
        variances.mul_(slopes).mul_(slopes)
        *forget, input_, cell_, output = map(_Gate, means, variances, slopes)
        return _Gates(forget[0] if forget else None, input_, cell_, output, slopes)

    def _covariances(self, variance: Tensor) -> Tensor:
        """Return covariances between the gates' sums, [pairs, outputs, rows].

        The first is of the input and cell gates, the others are of the output gate with each other.
        """
        first = 1 if self._recurrent is None else 0
        mu = self._weights.mu.view(4, self._outputs, -1)[first:, :, : variance.shape[1]]
        with_output = mu[:-1] * mu[-1]
        with_output[:, :, self._inputs :] = 0
        pairs = torch.cat((mu[-3:-2] * mu[-2:-1], with_output))
        return (pairs.flatten(0, 1) @ variance.t()).view(len(pairs), self._outputs, -1)

    def _is_single(self) -> bool:
        return self._batch == 1 and self._steps == 1

    def _update_recurrent(self, mean: Tensor, variance: Tensor, slope: Tensor) -> None:
        """Update the recurrent states from prior to posterior, by the innovation of the output."""
        assert self._recurrent is not None
        hidden, cell = self._recurrent.hidden, self._recurrent.cell
        mean, variance = mean.t(), variance.t()
        self._recurrent = Recurrent(
            _moved(hidden, hidden.variance, mean, variance),
            _moved(cell, cell.variance * slope.t(), mean, variance),
        )

    def _variance_below(
        self, slopes: Tensor, squares: Tensor, variance_delta: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the sums over outputs of (sum over gates of slope * weight)^2 * innovation.

        Multiplied out, they are one matrix product over all pairs of gates.
        """
        weights = weights.view(len(slopes), self._outputs, -1)
        pairs = list(combinations(range(len(slopes)), 2))
        left = [slopes[a] * slopes[b] * variance_delta for a, b in pairs]
        right = [weights[a] * weights[b] * 2 for a, b in pairs]
        return torch.cat((squares.flatten(0, 1), *left)).t() @ torch.cat(
            ((weights * weights).flatten(0, 1), *right)
        )


def _tanh(x: _Gaussian) -> tuple[_Gaussian, Tensor]:
    """Return the moments of tanh(x), linearized at the mean, and the derivative there."""
    mean = x.mean.tanh()
    slope = (mean * mean).neg_().add_(1)
    return _Gaussian(mean, (x.variance * slope).mul_(slope)), slope


def _product(a: _Gaussian, b: _Gaussian, covariance: Tensor | None) -> _Gaussian:
    """Return the moments of a * b, by Gaussian multiplicative approximation."""
    mean = a.mean * b.mean
    variance = torch.addcmul(b.variance, b.mean, b.mean).mul_(a.variance)
    variance.addcmul_(b.variance, a.mean * a.mean)
    if covariance is not None:
        variance.addcmul_(covariance, torch.add(covariance, mean, alpha=2))
        mean.add_(covariance)
    return _Gaussian(mean, variance)


def _moved(prior: _Gaussian, gain: Tensor, mean: Tensor, variance: Tensor) -> _Gaussian:
    return _Gaussian(prior.mean + gain * mean, prior.variance + gain * gain * variance)
