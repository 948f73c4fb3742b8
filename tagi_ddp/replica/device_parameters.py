"""A replica's parameters and deltas on a device, as flat tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from tagi_ddp._backend import LEAST_VARIANCE
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica.apply import move
from tagi_ddp.replica.device_agreement import DeviceAgreement
from tagi_ddp.replica.protocol import Parameters


class DeviceParameters:
    """Parameters like those of `_backend.Parameters`, as flat tensors."""

    def __init__(self, host: Parameters, device: torch.device) -> None:
        """Allocate as many parameters as ``host`` has."""
        self.size: int = host.size
        self.blocks: list[tuple[int, int]] = host.blocks
        self.gaussians = torch.zeros(2, self.size, device=device)
        self.mu, self.var = self.gaussians
        self.deltas = torch.zeros(2 * self.size, device=device)
        # Flags of variances that were not positive in the last step; graphs write them in place.
        self._negative = torch.zeros(self.size, dtype=torch.bool, device=device)

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

    def apply(self, bucket: FloatArray, divisor: float, cap: float) -> None:
        deltas = torch.from_numpy(bucket).view(2, -1).to(self.deltas.device) / divisor
        move(self.gaussians, deltas, self._negative, cap)

    def pack_shard(self, bucket: FloatArray, begin: int) -> None:
        count = len(bucket) // 2
        shard = self.deltas.view(2, -1)[:, begin : begin + count]
        torch.from_numpy(bucket).view(2, -1).copy_(shard)

    def apply_shard(self, gaussians: FloatArray, begin: int, divisor: float, cap: float) -> None:
        """Cap and apply the deltas of the range from ``begin`` on, and replace them by the result.

        They are on the host, [means | variances]; the result is for `take_shard` on other ranks.
        """
        host = torch.from_numpy(gaussians).view(2, -1)
        deltas = host.to(self.deltas.device) / divisor
        shard = self.gaussians[:, begin : begin + host.shape[1]].clone()
        self._negative.zero_()
        negative = self._negative[begin : begin + host.shape[1]]
        move(shard, deltas, negative, cap, floor=-LEAST_VARIANCE)
        self._take(shard, begin)
        host.copy_(shard)

    def take_shard(self, gaussians: FloatArray, begin: int) -> None:
        """Replace the range from ``begin`` on by another rank's posterior."""
        host = torch.from_numpy(gaussians).view(2, -1)
        self._take(host.to(self.mu.device), begin)

    def take_posterior(self, gaussians: Tensor) -> None:
        """Replace means and variances by those of all ranks' parts, [2, size]."""
        self._take(gaussians, 0)

    def _take(self, gaussians: Tensor, begin: int) -> None:
        # A variance that was not positive is sent as a negative, so that all ranks count it.
        means, marked = gaussians
        part = slice(begin, begin + len(means))
        self.mu[part] = means
        self.var[part] = marked.abs()
        self._negative[part] = marked < 0

    @property
    def negative_variances(self) -> list[int]:
        return [
            int(self._negative[begin : begin + count].sum()) for begin, count in self.blocks[::2]
        ]

    def pack(self, bucket: FloatArray) -> None:
        torch.from_numpy(bucket).copy_(self.deltas)

    def read_posterior(self, gaussians: FloatArray) -> None:
        torch.from_numpy(gaussians).copy_(self.gaussians.view(-1))

    def write_posterior(self, gaussians: FloatArray) -> None:
        self.gaussians.view(-1).copy_(torch.from_numpy(gaussians))

    def add_deltas_to(self, sums: Tensor, layers: list[bool]) -> None:
        self._add(self.deltas, sums, layers)

    def add_to_deltas(self, sums: Tensor, layers: list[bool]) -> None:
        self._add(sums, self.deltas, layers)

    def _add(self, source: Tensor, target: Tensor, layers: list[bool]) -> None:
        for index, (begin, count) in enumerate(self.blocks):
            if layers[index // 2]:
                part = slice(begin, begin + count)
                for into, of in zip(target.chunk(2), source.chunk(2), strict=True):
                    into[part] += of[part]
