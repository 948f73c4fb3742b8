"""Embedding layers: an input is the index of a row of weights, which is the output.

As in the engine, deltas add up over steps and are never reset to zero. The variance's deltas are
multiplied by the variance once, not twice as in other layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagi_ddp.compute.layer import Gaussians, Layer
from tagi_ddp.compute.states import Deltas, States
from tagi_ddp.engine.dialect import dialect


class Embedding(Layer):
    """Weights are [embeddings, size]; inputs are indices as floats, [batch, inputs].

    Outputs are [batch, inputs * size], or in engines with sequences [batch * inputs, size].

    The output of the padding index is zeros; it may be outside the table. Any other index outside
    is an error.
    """

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._count, self._size = int(handle.num_embeddings), int(handle.embedding_dim)
        self._padding = int(handle.padding_idx)
        shape = (self._count, self._size)
        # They are copied, as the exchange with other replicas overwrites the deltas' memory.
        self.sums = torch.tensor([handle.delta_mu_w, handle.delta_var_w]).view(2, *shape)
        self._kept = torch.empty(0)  # a copy of the sums
        self._batch = 0
        self._saved: tuple[Tensor, Tensor] | None = None

    def keep(self) -> None:
        """Copy the sums."""
        self._kept = self._kept.to(self.sums.device).resize_as_(self.sums).copy_(self.sums)

    def restore(self) -> None:
        """Restore the copy."""
        self.sums.copy_(self._kept)

    def restore_if(self, refused: Tensor) -> bool:
        """Restore the copy if ``refused`` is true."""
        torch.where(refused, self._kept, self.sums, out=self.sums)
        return True

    def bind(self, weights: Gaussians, biases: Gaussians | None) -> None:
        """Use these parameters from now on."""
        self._weights = weights.viewed(self._count, self._size)
        self.sums = self.sums.to(weights.mu.device)

    def forward(self, states: States, training: bool) -> States:
        """Look up means and variances of the rows, with zeros for the padding index."""
        indices = states.mean.reshape(-1).long()
        padding = indices == self._padding
        indices = indices.masked_fill(padding, 0)
        self._saved = (indices, padding) if training else None
        zero = padding.unsqueeze(1)
        shape = (-1, self._size) if dialect().sequences else (states.batch, -1)
        self._batch = states.batch
        rows = [
            table.index_select(0, indices).masked_fill_(zero, 0).view(shape)
            for table in (self._weights.mu, self._weights.var)
        ]
        return States(rows[0], rows[1])

    def backward(self, deltas: Deltas, to_input: bool) -> Deltas:
        """Add innovation * variance to the rows' deltas; indices have no innovation."""
        assert self._saved is not None
        indices, padding = self._saved
        weights = self._weights
        gain = weights.var.index_select(0, indices)
        for innovation, total, out in zip(
            (deltas.mean, deltas.variance),
            self.sums,
            (weights.delta_mu, weights.delta_var),
            strict=True,
        ):
            rows = innovation.view(-1, self._size) * gain
            total.index_add_(0, indices, rows.masked_fill_(padding.unsqueeze(1), 0))
            out.copy_(total)
        if not to_input:
            return deltas
        zeros = gain.new_zeros(self._batch, len(indices) // self._batch)
        return Deltas(zeros, zeros.clone())
