"""A Sequential on a GPU that the engine computes by its own CUDA kernels.

After ``model.to_device("cuda:0")`` the engine keeps means, variances and deltas on the device, in
eight arrays a layer. Here they are views in place: deltas are gathered from them into one bucket,
so that one collective reduces them all, and the new posterior is written back to them.

The engine gives all its work to CUDA's legacy default stream, which is torch's default, too. Where
torch's current stream is another one, both directions are ordered against the engine by events.

No GPU has run this yet: the tests' devices are the host's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.replica.cuda_layers import STATISTICS, CudaLayers
from tagi_ddp.replica.cuda_memory import CudaMemory, Memory
from tagi_ddp.replica.device import DeviceReplica
from tagi_ddp.replica.device_agreement import DeviceAgreement
from tagi_ddp.replica.host import attach


def move_to_device(
    model: Any, device: str, memory_of: Callable[[int], Memory] = CudaMemory
) -> CudaReplica:
    """Move a model from the CPU to ``device``, like "cuda:0", with all its state.

    The engine's own ``to_device`` draws new parameters for some layers. Raises ValueError,
    BackendUnavailable or LayoutError.
    """
    if re.fullmatch(r"cuda:\d{1,4}", device) is None:
        raise ValueError(f"device must be like 'cuda:0', got {device!r}")
    memory_of(int(device.removeprefix("cuda:")))  # the engine would end the process
    before = attach(model)
    kept = [(name, array.copy()) for name, array in before.state()]
    model.to_device(device)
    replica = CudaReplica(model, memory_of)
    for (name, array), (_, values) in zip(replica.state(), kept, strict=True):
        if array.shape != values.shape:
            raise LayoutError(f"layer {name} has another size on {device}")
        array[...] = values
    replica.push()
    return replica


class CudaReplica(DeviceReplica):
    """What `Replica` promises, for a model that is on a GPU.

    The engine's memory on the device is the truth: `pull` gathers it into ``parameters`` and
    ``statistics``, and what changes these writes it back. The engine's own copies on the host are
    what `state` shows.
    """

    def __init__(self, model: Any, memory_of: Callable[[int], Memory] = CudaMemory) -> None:
        """Verify every layer before anything is written.

        Args:
            model: a pytagi Sequential after ``to_device("cuda:...")``.
            memory_of: gives the memory of the device with a number.

        Raises:
            ValueError: a layer is on the CPU, or none has parameters.
            BackendUnavailable: CUDA's driver cannot be used.
            LayoutError: memory is not as expected. There is no slow way around it, as the engine
                tells nobody the deltas on a device: keep the model on the CPU, and let torch
                compute on the GPU, or use pytagi 0.2.1.
        """
        self._engine = CudaLayers(model, memory_of)
        super().__init__(self._engine, self._engine.memory.device)

    def pull(self) -> None:
        """Gather the engine's means, variances, deltas and running statistics."""
        self._engine.pull()
        self.version = self._engine.version
        parameters = self.parameters
        delta_means, delta_variances = parameters.deltas.chunk(2)
        with self._engine.memory.ordered():
            torch.cat(self._views("mu"), out=parameters.mu)
            torch.cat(self._views("var"), out=parameters.var)
            torch.cat(self._views("delta_mu"), out=delta_means)
            torch.cat(self._views("delta_var"), out=delta_variances)
            for own, view in zip(self.statistics.tensors, self._statistics(), strict=True):
                own.copy_(view)

    def push(self) -> None:
        super().push()
        self._write()

    def updated(self) -> None:
        """Write means, variances and running statistics to the engine's memory."""
        super().updated()
        self._write()

    def export(self) -> None:
        """Copy the state on the device, which forward has changed, too, to the host."""
        self.pull()
        self._ahead = True
        super().export()

    def applied(self, agreement: DeviceAgreement) -> None:
        """Write the result to the engine's memory, too."""
        super().applied(agreement)
        self._write()

    def share(self, communicator: Communicator, root: int = 0) -> None:
        super().share(communicator, root)
        self._write()

    def arrays(self) -> list[dict[str, Any]]:
        """Return views of the engine's memory on the device; flags are on the host."""
        return [
            {name: views.get(name, array) for name, array in arrays.items()}
            for arrays, views in zip(self._engine.arrays(), self._engine.views, strict=True)
        ]

    def _write(self) -> None:
        """Write means, variances and running statistics to the engine's memory."""
        counts = [count for _, count in self.parameters.blocks]
        with self._engine.memory.ordered():
            for kind, flat in (("mu", self.parameters.mu), ("var", self.parameters.var)):
                for view, part in zip(self._views(kind), flat.split(counts), strict=True):
                    view.copy_(part)
            for own, view in zip(self.statistics.tensors, self._statistics(), strict=True):
                view.copy_(own)

    def _views(self, kind: str) -> list[Tensor]:
        """Return the engine's arrays of a kind, like "mu", in the order of the flat sequence."""
        return [views[f"{kind}_{part}"] for views in self._engine.views for part in "wb"]

    def _statistics(self) -> list[Tensor]:
        """Return the engine's running statistics, in the order of ``statistics``."""
        return [v[name] for v in self._engine.views if STATISTICS[0] in v for name in STATISTICS]
