"""A replica on a device; the engine's memory is its copy on the host, written on demand.

The host waits for the device only to read its state: in `DeviceReplica.export`, and in an exchange
of deltas over the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tagi_ddp._backend import Contribution
from tagi_ddp._backend import Parameters as HostParameters
from tagi_ddp.communicators import Buffer, Communicator, all_gather_object
from tagi_ddp.engine.layers import PARAMETERS
from tagi_ddp.replica.device_agreement import Constants, DeviceAgreement, Field, Outcomes, vote_of
from tagi_ddp.replica.device_parameters import DeviceParameters, DeviceShards
from tagi_ddp.replica.host import HostReplica
from tagi_ddp.replica.staging import Sum

_STATISTICS = ("mu_ra", "var_ra")


class DeviceReplica:
    """A replica on a device, with the methods that `HostReplica` describes."""

    in_place = False

    def __init__(self, host: HostReplica, device: torch.device) -> None:
        """Copy the state of ``host``."""
        self.device = str(device)
        self._host = host
        self.layers = host.layers
        self.version = 0
        self.parameters = DeviceParameters(host.parameters, device)
        self.statistics = DeviceStatistics(host, device)
        parts = iter(self.statistics.parts)
        self._tensors = [
            self._tensors_of(index, arrays, parts) for index, arrays in enumerate(host.arrays())
        ]
        self.outcomes = Outcomes()
        self._constants = Constants(device, self.parameters.cap_factor)
        self._ahead = False
        self.push()

    def _tensors_of(
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
        """Do nothing: the device has the present state."""

    def push(self) -> None:
        """Copy the arrays of `state` to the engine's memory and to the device."""
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
        """Record that the device is ahead of the engine's memory."""
        self._ahead = True

    def state(self) -> list[tuple[str, NDArray[Any]]]:
        """Return views of the engine's memory; call `export` before."""
        return self._host.state()

    def arrays(self) -> list[dict[str, Any]]:
        """Return the tensors on the device."""
        return self._tensors

    @property
    def on_host(self) -> HostParameters:
        return self._host.on_host

    def zeros(self) -> Buffer:
        return torch.zeros_like(self.parameters.deltas)

    def step_alone(self, samples: int, alone_of: int) -> str | DeviceAgreement:
        """Put a step by the own deltas into the queue; `take_refused` reports a refusal."""
        if not samples:
            return ""
        agreement = self.apply_alone(samples, alone_of)
        self.applied(agreement)
        return agreement

    def apply_alone(self, samples: int, alone_of: int = 1) -> DeviceAgreement:
        """Apply the own deltas, unless one is NaN or infinite; call `applied` after it."""
        agreement = DeviceAgreement.of_one(
            self.parameters.deltas, samples, alone_of, self._constants
        )
        self.parameters.apply_agreed(agreement)
        return agreement

    def applied(self, agreement: DeviceAgreement) -> None:
        """Send the outcome of a step to the host."""
        self.outcomes.add(agreement.table)
        self._ahead = True

    def queue(
        self, communicator: Communicator, average: bool, sharded: bool
    ) -> Callable[[Contribution], DeviceAgreement] | None:
        """Return `agree` for the ranks of ``communicator``; None if deltas go over the host."""
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
            Sum(communicator, values, self.device).wait()
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

        All of this is on the device, where the communicator has its buffers, unless it is of one
        rank. With ``shards`` each rank applies its part.
        """
        if communicator.size == 1 and contribution.batch:
            agreement = self.apply_alone(contribution.batch)
            self.applied(agreement)
            return agreement
        parameters, statistics = self.parameters, self.statistics
        table = vote_of(contribution, parameters.deltas, self._constants)[None]
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
            # The votes are gathered after the group: once they arrive, it is complete.
            vote, table = table, table.new_zeros(communicator.size, table.shape[1])
            work: Any = communicator.all_gather(vote, table, async_op=True)
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
        if communicator.device == "cpu":
            self._host.share(communicator, root)
            self.push()
            return
        self._host.pull()
        self.push()
        for tensor in (self.parameters.gaussians.view(-1), self.statistics.flat):
            if tensor.numel():
                communicator.broadcast(tensor, root)
        flags = all_gather_object(communicator, [flag.tolist() for flag in self.statistics.flags])
        for flag, first in zip(self.statistics.flags, flags[root], strict=True):
            flag[:] = first
        self._ahead = True

    def _pairs(self) -> list[tuple[Tensor, Any]]:
        """Return each tensor that is not empty, with the engine's array."""
        return [
            (tensor, arrays[name])
            for tensors, arrays in zip(self._tensors, self._host.arrays(), strict=True)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and tensor.numel()
        ]


class DeviceStatistics:
    """Running statistics like `_backend`'s, as a ``flat`` tensor and its ``parts`` by layer."""

    def __init__(self, host: HostReplica, device: torch.device) -> None:
        """Allocate as many statistics as ``host`` has."""
        norms = [arrays for arrays in host.arrays() if "first_batch" in arrays]
        sizes = [norm[name].size for norm in norms for name in norm if name in _STATISTICS]
        self.size: int = sum(sizes)
        self.flat = torch.zeros(self.size, device=device)
        self.parts = self.flat.split(sizes)
        self.flags: list[NDArray[np.uint8]] = [norm["first_batch"] for norm in norms]
        self._kept, self._kept_flags = torch.empty_like(self.flat), [0] * len(self.flags)

    @property
    def await_first_batch(self) -> bool:
        """True if the next batch's statistics replace some, instead of being averaged with them."""
        return any(flag[0] for flag in self.flags)

    def keep(self) -> None:
        """Copy the statistics and the flags."""
        self._kept.copy_(self.flat)
        self._kept_flags = [flag[0] for flag in self.flags]

    def restore(self) -> None:
        """Restore the copies."""
        self.flat.copy_(self._kept)
        for flag, kept in zip(self.flags, self._kept_flags, strict=True):
            flag[0] = kept

    def restore_if(self, refused: Tensor) -> bool:
        """Restore them if ``refused`` is true; return False if flags have changed, on the host."""
        if self._kept_flags != [flag[0] for flag in self.flags]:
            return False
        if self.size:
            torch.where(refused, self._kept, self.flat, out=self.flat)
        return True

    def unpack(self, values: Tensor, total: float) -> None:
        """Replace the statistics by ``values`` / ``total``."""
        self._replace(values / total)

    def unpack_agreed(self, values: Tensor, agreement: DeviceAgreement) -> None:
        """Replace them by ``values`` / the samples of all ranks, unless the step is refused."""
        means = values / agreement.table[:, Field.SAMPLES].sum().clamp(min=1)
        self._replace(torch.where(agreement.refused, self.flat, means))

    def _replace(self, flat: Tensor) -> None:
        self.flat.copy_(flat)
        for flag in self.flags:  # A rank without a batch of its own has them now, too.
            flag[0] = 0
