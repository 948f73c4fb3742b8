"""A replica's parameters and deltas on a device, as flat tensors, and their capped update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tagi_ddp import kernels
from tagi_ddp._backend import LEAST_VARIANCE
from tagi_ddp._backend import Parameters as HostParameters
from tagi_ddp.communicators import Communicator
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica.device_agreement import DeviceAgreement


class DeviceParameters:
    """Parameters like those of `_backend.Parameters`, as flat tensors; buckets are on the host."""

    def __init__(self, host: HostParameters, device: torch.device) -> None:
        """Allocate as many parameters as ``host`` has."""
        self.size: int = host.size
        self.blocks: list[tuple[int, int]] = host.blocks
        self.gaussians = torch.zeros(2, self.size, device=device)
        self.mu, self.var = self.gaussians
        self.deltas = torch.zeros(2 * self.size, device=device)
        # Flags of variances that were not positive in the last step; graphs write them in place.
        self._negative = torch.zeros(self.size, dtype=torch.bool, device=device)
        self._host = host

    def cap_factor(self, batch: int) -> float:
        """Return the cap factor of a step of ``batch`` samples, the same for all layers."""
        return self._host.cap_factor(batch)

    def first_not_finite(self) -> str:
        """Return the first layer with a NaN or infinite delta, or ""; waits for the device."""
        if bool(torch.isfinite(self.deltas).all()):
            return ""
        first = int((~torch.isfinite(self.deltas)).nonzero()[0]) % self.size
        index = max(i for i, (begin, _) in enumerate(self.blocks) if begin <= first)
        return f"number {index // 2} of those with parameters"

    def apply_agreed(self, agreement: DeviceAgreement) -> None:
        """Cap and apply the deltas, the sums of all ranks, unless the step is refused."""
        if agreement.divisor is not None:
            self.deltas.div_(agreement.divisor)
        deltas = self.deltas.view(2, -1)
        move(self.gaussians, deltas, self._negative, agreement.cap, agreement.refused)

    def apply(self, bucket: FloatArray, divisor: float, batch: int) -> None:
        """Divide, cap and apply the deltas of a bucket, as those of ``batch`` samples."""
        deltas = torch.from_numpy(bucket).view(2, -1).to(self.deltas.device) / divisor
        move(self.gaussians, deltas, self._negative, self.cap_factor(batch))

    def pack_shard(self, bucket: FloatArray, begin: int) -> None:
        """Copy the deltas of the range from ``begin`` on, [means | variances]."""
        count = len(bucket) // 2
        shard = self.deltas.view(2, -1)[:, begin : begin + count]
        torch.from_numpy(bucket).view(2, -1).copy_(shard)

    def apply_shard(self, gaussians: FloatArray, begin: int, divisor: float, batch: int) -> None:
        """Cap and apply the deltas of the range from ``begin`` on, and replace them by the result.

        They are on the host, [means | variances]; the result is for `take_shard` on other ranks.
        """
        host = torch.from_numpy(gaussians).view(2, -1)
        deltas = host.to(self.deltas.device) / divisor
        shard = self.gaussians[:, begin : begin + host.shape[1]].clone()
        self._negative.zero_()
        negative = self._negative[begin : begin + host.shape[1]]
        move(shard, deltas, negative, self.cap_factor(batch), floor=-LEAST_VARIANCE)
        self.take(shard, begin)
        host.copy_(shard)

    def take_shard(self, gaussians: FloatArray, begin: int) -> None:
        """Replace the range from ``begin`` on by another rank's posterior."""
        host = torch.from_numpy(gaussians).view(2, -1)
        self.take(host.to(self.mu.device), begin)

    def take(self, gaussians: Tensor, begin: int) -> None:
        """Replace the range from ``begin`` on by a posterior of `move` with a negative floor."""
        # A variance that was not positive is sent as a negative, so that all ranks count it.
        means, marked = gaussians
        part = slice(begin, begin + len(means))
        self.mu[part] = means
        self.var[part] = marked.abs()
        self._negative[part] = marked < 0

    @property
    def negative_variances(self) -> list[int]:
        """By layer, the number of weights' variances that the last step found not positive."""
        return [
            int(self._negative[begin : begin + count].sum()) for begin, count in self.blocks[::2]
        ]

    def pack(self, bucket: FloatArray) -> None:
        """Copy the deltas to a bucket."""
        torch.from_numpy(bucket).copy_(self.deltas)

    def read_posterior(self, gaussians: FloatArray) -> None:
        """Copy means and variances to ``gaussians``, on the host."""
        torch.from_numpy(gaussians).copy_(self.gaussians.view(-1))

    def write_posterior(self, gaussians: FloatArray) -> None:
        """Replace means and variances by ``gaussians``, on the host."""
        self.gaussians.view(-1).copy_(torch.from_numpy(gaussians))

    def add_deltas_to(self, sums: Tensor, layers: list[bool]) -> None:
        """Add the deltas of the layers that ``layers`` flags to ``sums``."""
        self._add(self.deltas, sums, layers)

    def add_to_deltas(self, sums: Tensor, layers: list[bool]) -> None:
        """Add ``sums`` to the deltas of the layers that ``layers`` flags."""
        self._add(sums, self.deltas, layers)

    def _add(self, source: Tensor, target: Tensor, layers: list[bool]) -> None:
        for index, (begin, count) in enumerate(self.blocks):
            if layers[index // 2]:
                part = slice(begin, begin + count)
                for into, of in zip(target.chunk(2), source.chunk(2), strict=True):
                    into[part] += of[part]


class DeviceShards:
    """The step of sharded replicas: each rank updates its part, and all gather the results.

    All parts have the same length, whatever the number of parameters: NCCL is fastest with those.
    """

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
        parameters.take(everyone.transpose(0, 1).reshape(2, -1)[:, : parameters.size], 0)

    def _by_rank(self, flat: Tensor) -> Tensor:
        """Return a copy of [means | variances] as [rank, means and variances, part]."""
        _, ranks, count = self._shape
        halves = flat.view(2, -1)
        padded = pad(halves, (0, ranks * count - halves.shape[1]))
        return padded.view(self._shape).transpose(0, 1).contiguous()


def move(
    gaussians: Tensor,
    deltas: Tensor,
    negative: Tensor,
    cap: float | Tensor,
    refused: Tensor | None = None,
    floor: float = LEAST_VARIANCE,
) -> None:
    """Add deltas to means and variances, [2, n], by at most sqrt(var) / cap each, as the engine.

    A variance that is not positive becomes ``floor`` and is flagged in ``negative``. Nothing moves
    if ``refused``, a bool on the device, is true.
    """
    if on_gpu := kernels.find(gaussians):
        on_gpu.move(gaussians, deltas, negative, cap, refused, floor)
        return
    variances = gaussians[1]
    bar = variances.sqrt().div_(cap)
    steps = torch.clamp(deltas, bar.neg(), bar)
    if refused is not None:
        steps.masked_fill_(refused, 0)
    gaussians += steps
    torch.le(variances, 0, out=negative)
    variances.masked_fill_(negative, floor)
