"""The step of sharded replicas on devices: each rank updates its part, and all gather the results.

All parts have the same length, whatever the number of parameters: NCCL is fastest with those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tagi_ddp._backend import LEAST_VARIANCE
from tagi_ddp.communicators import Communicator
from tagi_ddp.replica.apply import move
from tagi_ddp.replica.device_agreement import DeviceAgreement
from tagi_ddp.replica.device_parameters import DeviceParameters


class DeviceShards:
    """The parts of ``parameters`` by rank."""

    def __init__(self, parameters: DeviceParameters, communicator: Communicator) -> None:
        self._parameters = parameters
        self._communicator = communicator
        ranks = communicator.size
        self._shape = (2, ranks, -(-parameters.size // ranks))  # means and variances
        self._shard: Tensor | None = None  # this rank's, means and variances

    def reduce(self) -> None:
        """Sum the deltas of all ranks, for each rank those of its part; call it in a group."""
        whole = self._by_rank(self._parameters.deltas)
        self._shard = torch.empty_like(whole[0])
        self._communicator.reduce_scatter(whole.view(-1), self._shard.view(-1))

    def apply(self, agreement: DeviceAgreement) -> None:
        """Cap and apply the deltas of all parts, unless the step is refused."""
        assert self._shard is not None
        deltas, self._shard = self._shard, None
        if agreement.divisor is not None:
            deltas.div_(agreement.divisor)
        parameters, rank = self._parameters, self._communicator.rank
        shard = self._by_rank(parameters.gaussians)[rank]
        # All ranks count the variances that were not positive, which are sent as negatives.
        negative = torch.empty_like(shard[1], dtype=torch.bool)
        move(shard, deltas, negative, agreement.cap, agreement.refused, floor=-LEAST_VARIANCE)
        everyone = shard.new_empty(self._communicator.size, *shard.shape)
        work: Any = self._communicator.all_gather(
            shard.reshape(-1), everyone.view(-1), async_op=True
        )
        work.order()
        parameters.take_posterior(everyone.transpose(0, 1).reshape(2, -1)[:, : parameters.size])

    def _by_rank(self, flat: Tensor) -> Tensor:
        """Return a copy of [means | variances] as [rank, means and variances, part]."""
        _, ranks, count = self._shape
        halves = flat.view(2, -1)
        padded = pad(halves, (0, ranks * count - halves.shape[1]))
        return padded.view(self._shape).transpose(0, 1).contiguous()
