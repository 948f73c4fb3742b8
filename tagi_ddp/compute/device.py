"""A replica that lives on a device: the engine's memory is its copy on the host, written on demand.

Nothing here makes the host wait for the device, but what reads its state: `DeviceReplica.export`,
and an exchange of other ranks' deltas by way of the hosts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tagi_ddp._backend import Contribution
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.compute import FloatArray
from tagi_ddp.compute.agreement import WORDS, DeviceAgreement, Outcomes, words_of
from tagi_ddp.compute.capped import LEAST_VARIANCE, move
from tagi_ddp.compute.device_shards import DeviceShards
from tagi_ddp.compute.posteriors import add_change, change_since
from tagi_ddp.engine.adapter import Replica, share_on_host
from tagi_ddp.engine.layers import PARAMETERS

_STATISTICS = ("mu_ra", "var_ra")


class DeviceReplica:
    """What `Replica` promises, on a device."""

    def __init__(self, host: Replica, device: torch.device) -> None:
        """Copy the state of ``host``."""
        self._host = host
        self.layers = host.layers
        self.version = 0
        self.parameters = DeviceParameters(host.parameters, device)
        self._tensors = [self._place(index, arrays) for index, arrays in enumerate(host.arrays())]
        norms = [layer for layer in self._tensors if "first_batch" in layer]
        self.statistics = DeviceStatistics(
            [norm[name] for norm in norms for name in _STATISTICS],
            [norm["first_batch"] for norm in norms],
        )
        self.outcomes = Outcomes()
        self._ahead = False
        self.push()

    def _place(self, index: int, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return a layer's tensors; flags stay on the host."""
        tensors: dict[str, Any] = {}
        for name, array in arrays.items():
            if name in PARAMETERS:
                flat = self.parameters.mu if name.startswith("mu") else self.parameters.var
                begin, count = self.parameters.blocks[2 * index + name.endswith("_b")]
                tensors[name] = flat[begin : begin + count]
            elif name in _STATISTICS:
                tensors[name] = torch.empty(array.size, device=self.parameters.mu.device)
            else:
                tensors[name] = array
        return tensors

    def pull(self) -> None:
        """Do nothing: what is on the device is the present state."""

    def push(self) -> None:
        """Copy the engine's means, variances and running statistics to the device."""
        self._host.pull()
        for tensor, array in self._pairs():
            tensor.copy_(torch.from_numpy(array), non_blocking=True)
        self._ahead = False

    def export(self) -> None:
        """Copy the state to the engine's memory, if the device is ahead."""
        if not self._ahead:
            return
        self._host.pull()
        for tensor, array in self._pairs():
            torch.from_numpy(array).copy_(tensor)
        self._host.push()
        self._ahead = False

    def updated(self) -> None:
        """Remember that the device is ahead."""
        self._ahead = True

    def state(self) -> list[tuple[str, NDArray[Any]]]:
        """Return views of the engine's memory; `export` before."""
        return self._host.state()

    def arrays(self) -> list[dict[str, Any]]:
        """Return the tensors on the device."""
        return self._tensors

    def zeros(self) -> Tensor:
        """Return zeros for sums of deltas, [means | variances]."""
        return torch.zeros_like(self.parameters.deltas)

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks that made an earlier step be refused, once; the host learns it late."""
        return self.outcomes.take_refused(everything)

    def agree(
        self,
        communicator: Communicator,
        contribution: Contribution,
        average: bool,
        shards: DeviceShards | None = None,
    ) -> DeviceAgreement:
        """Reduce the deltas and running statistics of all ranks, agree, and apply them, in order.

        All on the device; the communicator's buffers live there, or it is of one rank. With
        ``shards`` each rank applies its part.
        """
        parameters, statistics = self.parameters, self.statistics
        table = words_of(contribution, parameters.deltas)[None]
        averages: Tensor | None = None
        if communicator.size > 1:
            if contribution.batch == 0:
                parameters.deltas.zero_()
            if shards is None:
                communicator.all_reduce(parameters.deltas, async_op=True)
            else:
                shards.reduce()
            if statistics.size:
                averages = statistics.packed(contribution.batch)
                communicator.all_reduce(averages, async_op=True)
            words, table = table, table.new_zeros(communicator.size, WORDS)
            work: Any = communicator.all_gather(words, table, async_op=True)
            work.order()
        agreement = DeviceAgreement(table, average)
        if shards is None:
            parameters.apply_agreed(agreement)
        else:
            shards.apply(agreement)
        if averages is not None:
            statistics.unpack_agreed(averages, agreement)
        self.outcomes.add(table)
        self._ahead = True
        return agreement

    def share(self, communicator: Communicator) -> None:
        """Give every rank rank 0's means, variances and running statistics."""
        if communicator.device == "cpu":
            share_on_host(self, communicator)
            return
        self.push()
        tensors = [self.parameters.mu, self.parameters.var, *self.statistics.tensors]
        for tensor in tensors:
            if tensor.numel():
                communicator.broadcast(tensor)
        flags = all_gather_object(communicator, [flag.copy() for flag in self.statistics.flags])
        for flag, first in zip(self.statistics.flags, flags[0], strict=True):
            flag[:] = first
        self._ahead = True

    def _pairs(self) -> list[tuple[Tensor, Any]]:
        """Return each tensor with the engine's array; biases that the engine leaves alone, not."""
        return [
            (tensor, arrays[name])
            for tensors, arrays in zip(self._tensors, self._host.arrays(), strict=True)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and tensor.numel()
        ]


class DeviceParameters:
    """What `_backend.Parameters` does, on flat tensors."""

    def __init__(self, host: Any, device: torch.device) -> None:
        """Make room for as many parameters as ``host`` has."""
        self.size: int = host.size
        self.blocks: list[tuple[int, int]] = host.blocks
        self.mu = torch.zeros(self.size, device=device)
        self.var = torch.zeros(self.size, device=device)
        self.deltas = torch.zeros(2 * self.size, device=device)
        self._negative: Tensor | None = None  # the variances that the last step met

    def first_not_finite(self) -> str:
        """Return which kind of deltas is NaN or infinite, or ""; waits for the device."""
        if bool(torch.isfinite(self.deltas).all()):
            return ""
        first = int((~torch.isfinite(self.deltas)).nonzero()[0]) % self.size
        index = max(i for i, (begin, _) in enumerate(self.blocks) if begin <= first)
        return f"number {index // 2} of those with parameters"

    def apply_agreed(self, agreement: DeviceAgreement) -> None:
        """Cap and apply the deltas, the sums of all ranks, if the ranks agreed on that."""
        mean, variance = self.deltas.div_(agreement.divisor).chunk(2)
        self._negative = move(self.mu, self.var, mean, variance, agreement.cap, agreement.applies)

    def apply(self, bucket: FloatArray, divisor: float, cap: float) -> None:
        """Cap and apply the deltas of a bucket on the host, [means | variances]."""
        mean, variance = (torch.from_numpy(bucket).to(self.deltas.device) / divisor).chunk(2)
        self._negative = move(self.mu, self.var, mean, variance, cap, None)

    def pack_shard(self, bucket: FloatArray, begin: int) -> None:
        """Copy the deltas of the range that begins there to a bucket on the host."""
        count = len(bucket) // 2
        shard = self.deltas.view(2, -1)[:, begin : begin + count]
        torch.from_numpy(bucket).view(2, -1).copy_(shard)

    def apply_shard(self, gaussians: FloatArray, begin: int, divisor: float, cap: float) -> None:
        """Cap and apply the deltas of the range that begins there, and replace them by the result.

        Those on the host, [means | variances]; the result is for `take_shard` on other ranks.
        """
        host = torch.from_numpy(gaussians).view(2, -1)
        deltas = host.to(self.deltas.device) / divisor
        shard = torch.stack((self.mu, self.var))[:, begin : begin + host.shape[1]].contiguous()
        move(*shard, *deltas, cap, None, floor=-LEAST_VARIANCE)
        self._negative = None
        self._take(shard, begin)
        host.copy_(shard)

    def take_shard(self, gaussians: FloatArray, begin: int) -> None:
        """Replace the range that begins there by another rank's posterior."""
        host = torch.from_numpy(gaussians).view(2, -1)
        self._take(host.to(self.mu.device), begin)

    def take_posterior(self, gaussians: Tensor) -> None:
        """Replace means and variances, [2, size], by what all ranks have made of their parts."""
        self._negative = None
        self._take(gaussians, 0)

    def _take(self, gaussians: Tensor, begin: int) -> None:
        # A variance that was not positive comes as its negative, so that all ranks count it.
        means, marked = gaussians
        part = slice(begin, begin + len(means))
        self.mu[part] = means
        self.var[part] = marked.abs()
        if self._negative is None:
            self._negative = torch.zeros_like(self.var, dtype=torch.bool)
        self._negative[part] = marked < 0

    @property
    def negative_variances(self) -> list[int]:
        """How many variances of each layer's weights the last step found not positive."""
        negative = self._negative
        weights = self.blocks[::2]
        if negative is None:
            return [0] * len(weights)
        return [int(negative[begin : begin + count].sum()) for begin, count in weights]

    def pack(self, bucket: FloatArray) -> None:
        """Copy the deltas to a bucket on the host."""
        torch.from_numpy(bucket).copy_(self.deltas)

    def read_posterior(self, gaussians: Tensor) -> None:
        """Copy means and variances to ``gaussians``, [means | variances]."""
        torch.cat((self.mu, self.var), out=gaussians)

    def write_posterior(self, gaussians: Tensor) -> None:
        """Replace means and variances."""
        for own, part in zip((self.mu, self.var), gaussians.chunk(2), strict=True):
            own.copy_(part)

    def change_since(self, now: Tensor, before: Tensor, change: Tensor) -> None:
        """Write how Gaussians came from others to ``change``."""
        change_since(now, before, change)

    def add_change(
        self, gaussians: Tensor, reference: Tensor, change: Tensor, own: Tensor | None = None
    ) -> list[int]:
        """Multiply Gaussians by ``change`` less ``own``; how many took a part of it, by layer."""
        guarded = add_change(gaussians, reference, change, own)
        return [
            int(guarded[begin : begin + weights + biases].sum())
            for (begin, weights), (_, biases) in zip(
                self.blocks[::2], self.blocks[1::2], strict=True
            )
        ]

    def add_deltas_to(self, sums: Tensor, layers: list[bool]) -> None:
        """Add the deltas of some layers to ``sums``."""
        self._add(self.deltas, sums, layers)

    def add_to_deltas(self, sums: Tensor, layers: list[bool]) -> None:
        """Add ``sums`` to the deltas of some layers."""
        self._add(sums, self.deltas, layers)

    def _add(self, source: Tensor, target: Tensor, layers: list[bool]) -> None:
        for index, (begin, count) in enumerate(self.blocks):
            if layers[index // 2]:
                part = slice(begin, begin + count)
                for into, of in zip(target.chunk(2), source.chunk(2), strict=True):
                    into[part] += of[part]


class DeviceStatistics:
    """What `_backend.RunningStatistics` does, on tensors."""

    def __init__(self, tensors: list[Tensor], first: list[NDArray[np.uint8]]) -> None:
        """Take the running means and variances of all layers, and their flags of first batches."""
        self.tensors = tensors
        self.flags = first
        self.size = sum(tensor.numel() for tensor in tensors)

    def pack(self, out: FloatArray, weight: float) -> None:
        """Write them to ``out``, times ``weight``."""
        torch.from_numpy(out).copy_(self.packed(weight))

    def unpack(self, values: FloatArray | Tensor, total: float) -> None:
        """Replace them by ``values`` / ``total``."""
        self._replace(torch.as_tensor(values).div(total))

    def packed(self, weight: float) -> Tensor:
        """Return them, flat, on the device, times ``weight``."""
        return torch.cat(self.tensors).mul_(weight)

    def unpack_agreed(self, values: Tensor, agreement: DeviceAgreement) -> None:
        """Replace them by ``values`` / the samples of all ranks, if the ranks agreed on that."""
        means = values / agreement.samples.clamp(min=1)
        self._replace(torch.where(agreement.applies, means, torch.cat(self.tensors)))

    def _replace(self, flat: Tensor) -> None:
        for tensor, part in zip(
            self.tensors, flat.split([t.numel() for t in self.tensors]), strict=True
        ):
            tensor.copy_(part)
        for flag in self.flags:  # a rank that has had no batch of its own has them now, too
            flag[0] = 0
