"""A replica that lives on a device: the engine's memory is its copy on the host, written on demand.

Nothing here makes the host wait for the device, but what reads its state: `DeviceReplica.export`,
and an exchange of other ranks' deltas by way of the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tagi_ddp._backend import Contribution
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.engine.layers import PARAMETERS
from tagi_ddp.replica.adaptive_sum import DeviceAdaptiveSum
from tagi_ddp.replica.device_agreement import Constants, DeviceAgreement, Outcomes, Word, words_of
from tagi_ddp.replica.device_codec import DeviceCodec
from tagi_ddp.replica.device_parameters import DeviceParameters
from tagi_ddp.replica.device_shards import DeviceShards
from tagi_ddp.replica.protocol import Replica
from tagi_ddp.replica.staging import Sum

_STATISTICS = ("mu_ra", "var_ra")


class DeviceReplica:
    """What `Replica` promises, on a device."""

    in_place = False
    memory = None

    def __init__(self, host: Replica, device: torch.device) -> None:
        """Copy the state of ``host``."""
        self.device = str(device)
        self._host = host
        self.layers = host.layers
        self.version = 0
        self.parameters = DeviceParameters(host.parameters, device)
        self.statistics = DeviceStatistics(host, device)
        parts = iter(self.statistics.parts)
        self._tensors = [
            self._place(index, arrays, parts) for index, arrays in enumerate(host.arrays())
        ]
        self.outcomes = Outcomes()
        self._constants = Constants(device)
        self._ahead = False
        self.push()

    def _place(
        self, index: int, arrays: dict[str, Any], statistics: Iterator[Tensor]
    ) -> dict[str, Any]:
        """Return a layer's tensors; flags stay on the host."""
        tensors: dict[str, Any] = {}
        for name, array in arrays.items():
            if name in PARAMETERS:
                flat = self.parameters.mu if name.startswith("mu") else self.parameters.var
                begin, count = self.parameters.blocks[2 * index + name.endswith("_b")]
                tensors[name] = flat[begin : begin + count]
            elif name in _STATISTICS:
                tensors[name] = next(statistics)
            else:
                tensors[name] = array
        return tensors

    def pull(self) -> None:
        """Do nothing: what is on the device is the present state."""

    def push(self) -> None:
        """Copy what `state` shows to the engine's memory and to the device."""
        self._host.push()
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
        return torch.zeros_like(self.parameters.deltas)

    def bucket(self, communicator: Communicator, more: int) -> Tensor:
        """Return the same and ``more``: no communicator has memory on a device."""
        return self.parameters.deltas.new_zeros(2 * self.parameters.size + more)

    def codec(self, bits: int) -> DeviceCodec:
        return DeviceCodec(bits, self.parameters.mu.device)

    def adaptive_sum(self) -> DeviceAdaptiveSum:
        return DeviceAdaptiveSum(self.parameters)

    def step_alone(self, samples: int, alone_of: int) -> str | DeviceAgreement:
        """Put a step by the own deltas into the device's queue; `take_refused` tells of it."""
        if not samples:
            return ""
        agreement = self.apply_alone(samples, alone_of)
        self.applied(agreement)
        return agreement

    def apply_alone(self, samples: int, alone_of: int = 1) -> DeviceAgreement:
        """Apply the own deltas, unless one is NaN or infinite; `applied` is to follow."""
        agreement = DeviceAgreement.of_one(
            self.parameters.deltas, samples, alone_of, self._constants
        )
        self.parameters.apply_agreed(agreement)
        return agreement

    def applied(self, agreement: DeviceAgreement) -> None:
        """Send to the host what has become of a step."""
        self.outcomes.add(agreement.table)
        self._ahead = True

    def queue(
        self, communicator: Communicator, average: bool, sharded: bool
    ) -> Callable[[Contribution], DeviceAgreement] | None:
        """Return `agree` for the ranks of ``communicator``; None where deltas go over the host."""
        if communicator.size > 1 and communicator.device == "cpu":
            return None
        shards: DeviceShards | None = None
        if sharded and communicator.size > 1:
            shards = DeviceShards(self.parameters, communicator)
        return lambda contribution: self.agree(communicator, contribution, average, shards)

    def keep_statistics(self) -> None:
        self.statistics.keep()

    def restore_statistics(self) -> None:
        self.statistics.restore()

    def restore_statistics_if(self, refused: Tensor) -> bool:
        return self.statistics.restore_if(refused)

    def average_statistics(self, communicator: Communicator, samples: int, total: int) -> None:
        if communicator.size > 1 and self.statistics.size:
            values = self.statistics.flat * samples
            Sum(communicator, values).wait()
            self.statistics.unpack(values, total)

    def take_refused(self, everything: bool) -> list[int]:
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
        if communicator.size == 1 and contribution.batch:
            agreement = self.apply_alone(contribution.batch)
            self.applied(agreement)
            return agreement
        parameters, statistics = self.parameters, self.statistics
        table = words_of(contribution, parameters.deltas, self._constants)[None]
        averages: Tensor | None = None
        if communicator.size > 1:
            if contribution.batch == 0:
                parameters.deltas.zero_()
            nccl: Any = communicator
            with nccl.group():
                if shards is None:
                    communicator.all_reduce(parameters.deltas)
                else:
                    shards.reduce()
                if statistics.size:
                    averages = statistics.flat * contribution.batch
                    communicator.all_reduce(averages)
            # Not in the group, but after it: they tell that it is complete.
            words, table = table, table.new_zeros(communicator.size, table.shape[1])
            work: Any = communicator.all_gather(words, table, async_op=True)
            work.order()
        agreement = DeviceAgreement.of_all(table, average, self._constants)
        if shards is None:
            parameters.apply_agreed(agreement)
        else:
            shards.apply(agreement)
        if averages is not None:
            statistics.unpack_agreed(averages, agreement)
        self.applied(agreement)
        return agreement

    def share(self, communicator: Communicator, root: int = 0) -> None:
        self._host.pull()
        if communicator.device == "cpu":
            for _, array in self.state():
                if array.size:
                    communicator.broadcast(array, root)
            self.push()
            return
        self.push()
        for tensor in (self.parameters.gaussians.view(-1), self.statistics.flat):
            if tensor.numel():
                communicator.broadcast(tensor, root)
        flags = all_gather_object(communicator, [flag.tolist() for flag in self.statistics.flags])
        for flag, first in zip(self.statistics.flags, flags[root], strict=True):
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


class DeviceStatistics:
    """What `_backend.RunningStatistics` does, on a ``flat`` tensor and its ``parts`` by layer."""

    def __init__(self, host: Replica, device: torch.device) -> None:
        """Make room for those of ``host``."""
        norms = [arrays for arrays in host.arrays() if "first_batch" in arrays]
        sizes = [norm[name].size for norm in norms for name in norm if name in _STATISTICS]
        self.size: int = sum(sizes)
        self.flat = torch.zeros(self.size, device=device)
        self.parts = self.flat.split(sizes)
        self.flags: list[NDArray[np.uint8]] = [norm["first_batch"] for norm in norms]
        self._kept, self._kept_flags = torch.empty_like(self.flat), [0] * len(self.flags)

    @property
    def await_first_batch(self) -> bool:
        """Whether the next batch's statistics replace some, instead of being averaged with them."""
        return any(flag[0] for flag in self.flags)

    def keep(self) -> None:
        """Copy the statistics and the flags."""
        self._kept.copy_(self.flat)
        self._kept_flags = [flag[0] for flag in self.flags]

    def restore(self) -> None:
        """Put the copies back."""
        self.flat.copy_(self._kept)
        for flag, kept in zip(self.flags, self._kept_flags, strict=True):
            flag[0] = kept

    def restore_if(self, refused: Tensor) -> bool:
        """Put them back if ``refused`` is true; False where flags have changed, on the host."""
        if self._kept_flags != [flag[0] for flag in self.flags]:
            return False
        if self.size:
            torch.where(refused, self._kept, self.flat, out=self.flat)
        return True

    def unpack(self, values: Tensor, total: float) -> None:
        """Replace them by ``values`` / ``total``."""
        self._replace(values / total)

    def unpack_agreed(self, values: Tensor, agreement: DeviceAgreement) -> None:
        """Replace them by ``values`` / the samples of all ranks, if the ranks agreed on that."""
        means = values / agreement.table[:, Word.SAMPLES].sum().clamp(min=1)
        self._replace(torch.where(agreement.refused, self.flat, means))

    def _replace(self, flat: Tensor) -> None:
        self.flat.copy_(flat)
        for flag in self.flags:  # a rank that has had no batch of its own has them now, too
            flag[0] = 0
