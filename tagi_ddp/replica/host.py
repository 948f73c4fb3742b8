"""A Sequential's parameters, deltas and running statistics, on the host.

Flat buffers are float32. Gaussians are [means | variances], deltas too, 2 * size elements.
`InPlace` reads and writes the engine's own memory. `Copied` uses the public getters and setters,
about a thousand times slower, if the layout of the memory cannot be verified.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp._backend import (
    EngineVectors,
    Parameters,
    RunningStatistics,
    batch_norm_statistics,
    engine_vectors,
)
from tagi_ddp.communicators import Buffer, Communicator
from tagi_ddp.engine.dialect import check_step
from tagi_ddp.engine.layers import (
    DELTAS,
    PARAMETERS,
    Layer,
    initialise,
    require_all_parameters,
    walk,
)
from tagi_ddp.engine.layout import batch_norm_address, check_layer, find_layout
from tagi_ddp.engine.pointers import LayoutError, address_of
from tagi_ddp.engine.shapes import cap_rows, require_steps, shapes
from tagi_ddp.environment import setting
from tagi_ddp.replica.parameter_file import statistics_of


def attach(model: Any) -> HostReplica:
    """Return the state of ``model``, a pytagi Sequential on the CPU.

    Falls back to the public interface, with one warning, if the engine's memory is not laid out as
    expected. With TAGI_DDP_ENGINE_ACCESS "public" it always uses that; with "memory", never.
    """
    access = setting("ENGINE_ACCESS") or "auto"
    if access not in ("auto", "memory", "public"):
        raise ValueError(f'TAGI_DDP_ENGINE_ACCESS is {access!r}; use "auto", "memory" or "public"')
    # The engine's to_device("cpu") leaves layers on the GPU; Python knows only their base class.
    if str(model.device) != "cpu" or any(layer.kind == "BaseLayer" for layer in walk(model)):
        raise ValueError(
            "model was moved to a GPU by its to_device(): give it as it is before that, and choose "
            "the GPU by device='cuda:0' and compute='torch'"
        )
    check_step()
    initialise(model)
    require_all_parameters(model)
    require_steps(model)
    if access == "public":
        return Copied(model)
    try:
        return InPlace(model)
    except LayoutError as error:
        if access == "memory":
            raise
        warnings.warn(
            f"the engine's memory is not as expected ({error}), so its public interface is used: "
            "correct, but a thousand times slower. tagi-ddp doctor tells more",
            RuntimeWarning,
            stacklevel=2,
        )
        return Copied(model)


class HostReplica(ABC):
    """A replica in the host's memory.

    device: the device of the parameters, here "cpu". in_place: True if they are the engine's own
    memory. layers: those with parameters, in order; a block is replaced by its layers. parameters:
    the means, variances and deltas of all layers, in order, as one flat sequence.
    """

    device = "cpu"
    in_place: bool

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.parameters = Parameters()
        self.statistics = RunningStatistics()
        self._kept: dict[str, list[NDArray[Any]]] = {}  # a copy of the statistics, by layer

    @property
    def on_host(self) -> Parameters:
        """The parameters in the engine's memory; `export` updates their values."""
        return self.parameters

    @property
    def version(self) -> int:
        """A number that changes when arrays that `arrays` has returned are no longer valid."""
        return self.parameters.version

    @abstractmethod
    def pull(self) -> None:
        """Make ``parameters`` show the engine's present state; call before each use."""

    @abstractmethod
    def push(self) -> None:
        """Copy changes of the arrays of `state` to the engine, and to the device of the replica."""

    @abstractmethod
    def arrays(self) -> list[dict[str, NDArray[Any]]]:
        """Return views of means and variances by `PARAMETERS`, for each layer.

        A BatchNorm2d also has its running averages "mu_ra" and "var_ra", and "first_batch".
        """

    def updated(self) -> None:
        """Record a change of ``parameters`` or of the running statistics; call it after each."""
        self.push()

    def export(self) -> None:  # noqa: B027
        """Copy the present state, if it is elsewhere, to the engine's memory and to `state`."""

    def state(self) -> list[tuple[str, NDArray[Any]]]:
        """Return views of all that must be equal on all replicas, with the layers' names.

        Means and variances, running statistics and their flags; valid until the next `pull`.
        """
        return [
            (layer.name, array)
            for layer, arrays in zip(self.layers, self.arrays(), strict=True)
            for array in arrays.values()
        ]

    def share(self, communicator: Communicator, root: int = 0) -> None:
        """Copy the means, variances and running statistics of rank ``root`` to all ranks."""
        self.pull()
        for _, array in self.state():
            if array.size:
                communicator.broadcast(array, root)
        self.push()

    def zeros(self) -> Buffer:
        """Return zeros for deltas, on the device of the replica."""
        return np.zeros(2 * self.parameters.size, np.float32)

    def step_alone(self, samples: int, alone_of: int) -> str:
        """Apply the own deltas, of ``samples`` samples, capped as for one of ``alone_of`` ranks.

        The step limit is that of the combined batch divided by sqrt(alone_of), because independent
        steps add up like a random walk. Nothing is applied if deltas are NaN or infinite: returns
        the first such layer, or "".
        """
        if not samples:
            return ""
        culprit = self.parameters.apply_own(samples * alone_of, math.sqrt(alone_of))
        self.push()
        return culprit

    def queue(self, communicator: Communicator, average: bool, sharded: bool) -> None:  # noqa: B027
        """Return a function that puts a step of all ranks into the device's queue, if it can."""

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks at fault for an earlier refused step that has not been reported yet.

        ``everything``: wait for the outcome of all steps so far. Here refusals raise at once.
        """
        return []

    def keep_statistics(self) -> None:
        """Copy the running statistics and their flags."""
        if self.statistics.size:
            kept = statistics_of(self.state())
            self._kept = {name: [part.copy() for part in parts] for name, parts in kept.items()}

    def restore_statistics(self) -> None:
        """Restore the last copy of `keep_statistics`."""
        if self.statistics.size:
            for name, parts in statistics_of(self.state()).items():
                for part, kept in zip(parts, self._kept[name], strict=True):
                    part[...] = kept

    def restore_statistics_if(self, refused: Any) -> bool:
        """Restore it, without a wait, if ``refused``, a tensor on the device, is true.

        Returns False, and does nothing, if only the host can restore.
        """
        return not self.statistics.size

    def average_statistics(self, communicator: Communicator, samples: int, total: int) -> None:
        """Average running statistics over the ranks, weighted by their samples, ``total`` of all.

        A collective call.
        """
        if communicator.size > 1 and self.statistics.size:
            values = np.empty(self.statistics.size, np.float32)
            self.statistics.pack(values, samples)
            communicator.all_reduce(values)
            self.statistics.unpack(values, total)


class InPlace(HostReplica):
    """A replica in the engine's own memory, verified layer by layer."""

    in_place = True

    def __init__(self, model: Any) -> None:
        """Verify every layer; raise LayoutError if one is not as expected."""
        layout = find_layout()
        super().__init__()
        self._vectors: list[EngineVectors] = []
        for layer, shape in shapes(model):
            address = address_of(layer.handle)
            check_layer(layer.handle, address, layout)
            vectors = engine_vectors(address + layout.vectors)
            if not vectors.size("mu_w"):
                continue
            self.layers.append(layer)
            self._vectors.append(vectors)
            self.parameters.add_engine_layer(
                layer.name,
                address + layout.vectors,
                address + layout.counter,
                bool(layer.handle.bias),
                cap_rows(layer, shape),
            )
            if layer.kind == "BatchNorm2d":
                self.statistics.add_engine_layer(batch_norm_address(layer.handle))

    def pull(self) -> None:
        """Find the layers' vectors again: the engine may have moved them."""
        self.parameters.refresh()

    def push(self) -> None:
        """Do nothing: the changes are in the engine's memory."""

    def arrays(self) -> list[dict[str, NDArray[Any]]]:
        """Return views of the engine's vectors."""
        all_arrays: list[dict[str, NDArray[Any]]] = []
        for layer, vectors in zip(self.layers, self._vectors, strict=True):
            arrays: dict[str, NDArray[Any]] = {name: vectors.view(name) for name in PARAMETERS}
            if layer.kind == "BatchNorm2d":
                mean, var, _, _, first = batch_norm_statistics(batch_norm_address(layer.handle))
                arrays |= {"mu_ra": mean, "var_ra": var, "first_batch": first}
            all_arrays.append(arrays)
        return all_arrays


class Copied(HostReplica):
    """A replica in copies of the engine's vectors, read and written by its public interface."""

    in_place = False

    def __init__(self, model: Any) -> None:
        """Copy once; raise RuntimeError for a layer that the public interface cannot write."""
        super().__init__()
        self._arrays: list[dict[str, NDArray[Any]]] = []
        self._counters: list[NDArray[np.int32]] = []
        for layer, shape in shapes(model):
            names = PARAMETERS + DELTAS
            arrays = {name: np.asarray(getattr(layer.handle, name), np.float32) for name in names}
            if not arrays["mu_w"].size:
                continue
            if layer.kind == "BatchNorm2d":
                raise RuntimeError(
                    f"layer {layer.name}: the engine's public interface cannot write running "
                    "statistics, so replicas would drift apart. tagi-ddp doctor says why its "
                    "memory cannot be used"
                )
            counter = np.zeros(1, np.int32)
            weights = [arrays[name] for name in names if name.endswith("_w")]
            biases = [arrays[name] for name in names if name.endswith("_b")]
            self.parameters.add_layer(layer.name, weights, biases, counter, cap_rows(layer, shape))
            self.layers.append(layer)
            self._arrays.append(arrays)
            self._counters.append(counter)

    def pull(self) -> None:
        """Copy means, variances and deltas from the engine."""
        for layer, arrays in zip(self.layers, self._arrays, strict=True):
            for name, array in arrays.items():
                array[:] = getattr(layer.handle, name)

    def push(self) -> None:
        """Copy means and variances to the engine."""
        for layer, arrays in zip(self.layers, self._arrays, strict=True):
            for name in PARAMETERS:
                setattr(layer.handle, name, arrays[name].tolist())

    def arrays(self) -> list[dict[str, NDArray[Any]]]:
        """Return the copies."""
        return [{name: arrays[name] for name in PARAMETERS} for arrays in self._arrays]
