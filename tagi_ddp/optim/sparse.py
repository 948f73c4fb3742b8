"""Sums over the ranks of sparse gradients, of which each rank has some rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.optim.chunks import as_real


def sparse_sum(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Return the sum of all ranks' tensors; a collective call, which waits.

    Args:
        tensor: of layout torch.sparse_coo; shape, dtype and sparse_dim() are equal on all ranks.
        communicator: of the ranks. A tensor on another device is copied to its device and back.

    Returns:
        the sum, coalesced, on the tensor's device; the same bits on all ranks.
    """
    own = tensor.detach().coalesce()
    counts = all_gather_object(communicator, own.indices().shape[1])

    def joined(rows: Tensor) -> Tensor:
        """Return the rows of all ranks, one after another."""
        shape, device = rows.shape[1:], torch.device(communicator.device)
        width = shape.numel()
        sent = rows.to(device).clone(memory_format=torch.contiguous_format).view(-1)
        received = sent.new_empty(sum(counts) * width)
        communicator.all_gather(
            sent.view(torch.uint8),
            received.view(torch.uint8),
            [count * width * sent.element_size() for count in counts],
        )
        return received.view(sum(counts), *shape).to(rows.device)

    values = joined(as_real(own.values()))
    if own.is_complex():
        values = torch.view_as_complex(values)
    return torch.sparse_coo_tensor(joined(own.indices().t()).t(), values, own.shape).coalesce()


def no_rows(like: Tensor, sparse_dim: int) -> Tensor:
    """Return zeros of the shape of ``like`` as a sparse tensor."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=like.device)
    values = like.new_empty(0, *like.shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, like.shape)
