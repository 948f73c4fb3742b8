"""A replica that lives on a device: the engine's memory is its copy on the host, written on demand.

Nothing here makes the host wait for the device, but what reads its state: `DeviceReplica.export`,
and an exchange with other ranks over the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tagi_ddp.compute import FloatArray
from tagi_ddp.engine.adapter import Replica
from tagi_ddp.engine.layers import PARAMETERS

_STATISTICS = ("mu_ra", "var_ra")


class DeviceReplica:
    """What `Replica` promises, on a device."""

    def __init__(self, host: Replica, device: torch.device, alone: bool) -> None:
        """Copy the state of ``host``; ``alone``: there is no other rank."""
        self._host = host
        self.layers = host.layers
        self.version = 0
        self.parameters = DeviceParameters(host.parameters, device, alone)
        self._tensors = [self._place(index, arrays) for index, arrays in enumerate(host.arrays())]
        norms = [layer for layer in self._tensors if "first_batch" in layer]
        self.statistics = DeviceStatistics(
            [norm[name] for norm in norms for name in _STATISTICS],
            [norm["first_batch"] for norm in norms],
        )
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

    def refused(self) -> bool:
        """Tell whether a step was refused since the last call; the host learns it late."""
        return self.parameters.refused()

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

    def __init__(self, host: Any, device: torch.device, alone: bool) -> None:
        """Make room for as many parameters as ``host`` has."""
        self.size: int = host.size
        self.blocks: list[tuple[int, int]] = host.blocks
        self.mu = torch.zeros(self.size, device=device)
        self.var = torch.zeros(self.size, device=device)
        self.deltas = torch.zeros(2 * self.size, device=device)
        self._alone = alone
        self._negative: Tensor | None = None  # the variances that the last step met
        self._flags: list[tuple[Tensor, Any]] = []  # of steps: on the host, when the event is over

    def first_not_finite(self) -> str:
        """Return which kind of deltas is NaN or infinite, or "".

        Alone, nobody waits for the answer: `apply_own` refuses on the device.
        """
        if self._alone or bool(torch.isfinite(self.deltas).all()):
            return ""
        first = int((~torch.isfinite(self.deltas)).nonzero()[0]) % self.size
        index = max(i for i, (begin, _) in enumerate(self.blocks) if begin <= first)
        return f"number {index // 2} of those with parameters"

    def apply_own(self, cap: float) -> None:
        """Cap and apply the own deltas; if one is not finite, change nothing, and set a flag."""
        fine = torch.isfinite(self.deltas).all()
        self._apply(self.deltas, cap, fine)
        if fine.is_cuda:
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag.copy_(fine, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._flags.append((flag, event))
        else:
            self._flags.append((fine, None))

    def apply(self, bucket: FloatArray, divisor: float, cap: float) -> None:
        """Cap and apply the deltas of a bucket on the host, [means | variances]."""
        deltas = torch.from_numpy(bucket).to(self.deltas.device)
        if divisor != 1:
            deltas = deltas / divisor
        self._apply(deltas, cap, None)

    def _apply(self, deltas: Tensor, cap: float, where: Tensor | None) -> None:
        """Move means and variances by their deltas, by sqrt(var) / cap at most; as the engine."""
        bar = self.var.sqrt().div_(cap)
        if where is not None:
            bar = torch.where(where, bar, torch.zeros_like(bar))
            deltas = torch.where(where, deltas, torch.zeros_like(deltas))
        mean, variance = deltas.chunk(2)
        self.mu += torch.minimum(torch.maximum(mean, -bar), bar)
        self.var += torch.minimum(torch.maximum(variance, -bar), bar)
        self._negative = self.var <= 0
        self.var.masked_fill_(self._negative, 1e-5)

    def refused(self) -> bool:
        """Tell whether a step whose flag has arrived since the last call was refused."""
        arrived = [flag for flag, event in self._flags if event is None or event.query()]
        self._flags = self._flags[len(arrived) :]
        return not all(bool(flag) for flag in arrived)

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
        self._tensors = tensors
        self._first = first
        self.size = sum(tensor.numel() for tensor in tensors)

    def pack(self, out: FloatArray, weight: float) -> None:
        """Write them to ``out``, times ``weight``."""
        torch.from_numpy(out).copy_(torch.cat(self._tensors).mul_(weight))

    def unpack(self, values: FloatArray, total: float) -> None:
        """Replace them by ``values`` / ``total``."""
        parts = torch.from_numpy(values).div(total).split([t.numel() for t in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part)
        for flag in self._first:  # a rank that has had no batch of its own has them now, too
            flag[0] = 0
