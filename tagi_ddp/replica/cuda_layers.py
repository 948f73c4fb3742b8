"""The layers of a pytagi Sequential on a GPU, found in memory and verified.

Python knows them as plain BaseLayer, and those inside of blocks not at all. So blocks are followed
through memory, whose layout (cpp_backend/engine/cuda_layout.h) is an assumption about somebody
else's binary: an object must be of a class that the engine exports, an array must be the device's
memory by the driver, and must hold what the engine's public copy of it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tagi_ddp._backend import (
    EngineLayer,
    Parameters,
    classes_at,
    cuda_batch_norm_statistics,
    cuda_layer_pointers,
    engine_layer,
    layers_in_block,
    layers_in_cuda_resnet_block,
)
from tagi_ddp.engine.layers import DELTAS, PARAMETERS, Layer
from tagi_ddp.engine.pointers import LayoutError, address_of, verify_layout
from tagi_ddp.replica.cuda_memory import Memory

STATISTICS = ("mu_ra", "var_ra")
# These have no parameters before the engine has seen a batch.
_INITIALISED_LATE = ("Conv2dCuda", "ConvTranspose2dCuda")


@dataclass(frozen=True)
class InnerLayer:
    """A layer inside of a block, which has no object in Python."""

    kind: str
    #: The object of the outermost block, which keeps the layer's memory alive.
    block: Any
    memory: EngineLayer

    def get_layer_info(self) -> str:
        """Return a description in the style of the engine's."""
        return f"{self.kind}({self.memory.input_size},{self.memory.output_size})"

    @property
    def num_threads(self) -> int:
        """How many threads the engine would use on the CPU."""
        return int(self.memory.num_threads)


@dataclass(frozen=True)
class Found:
    """A layer in memory; ``key`` names it in the engine's state_dict."""

    layer: Layer
    path: str
    key: str
    address: int

    @property
    def memory(self) -> EngineLayer:
        """The fields that all layers have."""
        return engine_layer(self.address)

    @property
    def counts(self) -> dict[str, int]:
        """How many floats each array on the device has; those that the engine leaves alone, none.

        Raises LayoutError if the engine's vectors on the host differ from what it has allocated.
        """
        memory, counts = self.memory, {}
        for name in PARAMETERS + DELTAS:
            is_used = name.endswith("_w") or memory.bias
            allocated = memory.num_weights if name.endswith("_w") else memory.num_biases
            counts[name] = memory.vector(name).size if is_used else 0
            if is_used and counts[name] != allocated:
                raise LayoutError(
                    f"layer {self.layer.name}: {name} has {counts[name]} elements on the host, "
                    f"not {allocated}"
                )
        return counts | {name: array.size for name, array in self.statistics.items()}

    @property
    def addresses(self) -> list[int]:
        """Where on the device the arrays of `counts` lie, in that order."""
        addresses = cuda_layer_pointers(self.address)
        if self.is_batch_norm:
            addresses += cuda_batch_norm_statistics(self.address)[3:]
        return addresses

    @property
    def is_batch_norm(self) -> bool:
        """Whether the layer has running statistics."""
        return self.layer.kind == "BatchNorm2dCuda"

    @property
    def statistics(self) -> dict[str, NDArray[np.float32]]:
        """Views of the running statistics on the host, by `STATISTICS`."""
        if not self.is_batch_norm:
            return {}
        mean, variance, *_ = cuda_batch_norm_statistics(self.address)
        return {"mu_ra": mean, "var_ra": variance}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return views of what the host has: means, variances, running statistics, their flag."""
        arrays: dict[str, NDArray[Any]] = {n: self.memory.vector(n) for n in PARAMETERS}
        if self.is_batch_norm:
            flag = cuda_batch_norm_statistics(self.address)[2]
            arrays |= self.statistics | {"first_batch": flag}
        return arrays


def walk_cuda(model: Any) -> Iterator[Found]:
    """Yield the layers of a Sequential on a GPU in order, those inside of blocks for the blocks.

    Raises LayoutError where there is no layer of the engine, ValueError for one on the CPU.
    """
    for index, handle in enumerate(model._cpp_backend.layers):
        yield from _walk(handle, address_of(handle), str(index), str(index))


def _walk(handle: Any, address: int, path: str, suffix: str) -> Iterator[Found]:
    """Yield the layers at ``address``; ``handle`` is Python's object of it, or of its block."""
    classes = classes_at(address)
    if "BaseLayer" not in classes:
        raise LayoutError(f"layer {path}: there is no layer of the engine where it should be")
    kind = classes[0]
    if kind == "LayerBlock":
        for index, inner in enumerate(layers_in_block(address)):
            yield from _walk(handle, inner, f"{path}.{index}", f"{suffix}.{index}")
    elif kind == "ResNetBlockCuda":
        main_block, shortcut = layers_in_cuda_resnet_block(address)
        yield from _walk(handle, main_block, f"{path}.main_block", f"main.{suffix}")
        if shortcut:
            yield from _walk(handle, shortcut, f"{path}.shortcut", f"shortcut.{suffix}")
    elif "BaseLayerCuda" not in classes:
        raise ValueError(
            f"layer {path} is a {kind}, on the CPU: call to_device() of the whole model before "
            "wrapping it"
        )
    else:
        if "." in path:
            handle = InnerLayer(kind, handle, engine_layer(address))
        layer = Layer(f"{path} ({handle.get_layer_info()})", kind, handle)
        yield Found(layer, path, f"{kind}.{suffix}", address)


def initialise_cuda(model: Any) -> None:
    """Give every layer its parameters now, which the engine does as late as in forward.

    What has been loaded into a layer is kept; the engine itself would draw new parameters.
    """
    late = [found for found in walk_cuda(model) if found.layer.kind in _INITIALISED_LATE]
    if all(found.memory.num_weights for found in late):
        return
    before = model.state_dict()
    model._cpp_backend.preinit_layer()
    drawn = model.state_dict()
    model.load_state_dict({key: before[key] if before[key][0] else drawn[key] for key in drawn})


class CudaLayers:
    """The engine's layers on a GPU: views of their arrays on the device, and of the host's copies.

    The copies are as old as the last time that the engine, or `CudaReplica`, has written them.
    """

    def __init__(self, model: Any, memory_of: Callable[[int], Memory]) -> None:
        """Find and verify all layers with parameters; raise LayoutError or ValueError."""
        verify_layout()
        initialise_cuda(model)
        self._found = [found for found in walk_cuda(model) if found.memory.vector("mu_w").size]
        if not self._found:
            raise ValueError("the model has no parameters to train")
        self.layers = [found.layer for found in self._found]
        self.memory = memory_of(self._found[0].memory.device_idx)
        #: Changes when `views` are no longer the same.
        self.version = 0
        #: The arrays on the device by name, for each layer.
        self.views: list[dict[str, Tensor]] = []
        self._addresses: list[list[int]] = []
        self._place()
        self.parameters = Parameters()
        for found in self._found:
            self.parameters.add_engine_layer(found.layer.name, found.address)
        with self.memory.ordered():
            self._verify_parameters(model)
            self._verify_statistics(model)

    def pull(self) -> None:
        """Find the arrays again: the engine may have moved them.

        Raises RuntimeError naming a layer whose number of parameters has changed.
        """
        self.parameters.refresh()
        if self._addresses != [found.addresses for found in self._found]:
            self._place()
            self.version += 1

    def push(self) -> None:
        """Do nothing: the host's copies are the engine's own."""

    def state(self) -> list[tuple[str, NDArray[Any]]]:
        return [
            (layer.name, array)
            for layer, arrays in zip(self.layers, self.arrays(), strict=True)
            for array in arrays.values()
        ]

    def arrays(self) -> list[dict[str, NDArray[Any]]]:
        """Return views of the host's copies, for each layer."""
        return [found.arrays() for found in self._found]

    def _place(self) -> None:
        """Make `views`; raise LayoutError unless each is a part of the device's memory of its own.

        Nothing is read yet.
        """
        addresses = [found.addresses for found in self._found]
        views: list[dict[str, Tensor]] = []
        spans: list[tuple[int, int, str]] = []  # the first byte, the one after the last
        for found, begins in zip(self._found, addresses, strict=True):
            views.append({})
            for (name, count), begin in zip(found.counts.items(), begins, strict=True):
                what = f"layer {found.layer.name}: {name} on the device"
                views[-1][name] = self._view(what, begin, count)
                if count:
                    spans.append((begin, begin + 4 * count, what))
        spans.sort()
        for (_, end, one), (begin, _, other) in pairwise(spans):
            if begin < end:
                raise LayoutError(f"{other} overlaps with {one}")
        self._addresses, self.views = addresses, views

    def _view(self, what: str, address: int, count: int) -> Tensor:
        if count == 0:
            return torch.empty(0, device=self.memory.device)
        if address == 0:
            raise LayoutError(f"{what} has a null pointer")
        if not self.memory.owns(address, count):
            raise LayoutError(f"{what} is not {count} floats in the memory of {self.memory.device}")
        return self.memory.tensor_at(address, count)

    def _verify_parameters(self, model: Any) -> None:
        """Compare means and variances with the engine's state_dict."""
        public = {key: values for key, values in model.state_dict().items() if len(values[0])}
        if differing := public.keys() ^ {found.key for found in self._found}:
            raise LayoutError(f"memory and the engine's state_dict differ in {sorted(differing)}")
        for found, views in zip(self._found, self.views, strict=True):
            for name, values in zip(PARAMETERS, public[found.key], strict=True):
                if name.endswith("_w") or found.memory.bias:
                    _compare(found, name, views[name], values)

    def _verify_statistics(self, model: Any) -> None:
        """Compare running statistics with the engine's get_norm_mean_var."""
        if not any(found.is_batch_norm for found in self._found):
            return
        if any(f.layer.kind == "LayerNormCuda" and "." in f.path for f in self._found):
            raise LayoutError(
                "running statistics cannot be verified: the engine cannot tell them where "
                "LayerNorm is inside of a block"
            )
        public = model.get_norm_mean_var()
        for index, handle in enumerate(model._cpp_backend.layers):
            own = [
                (found, views)
                for found, views in zip(self._found, self.views, strict=True)
                if found.is_batch_norm and found.path.split(".")[0] == str(index)
            ]
            if not own:
                continue
            name = f"{handle.get_layer_info()}_{index}"
            means, variances, *_ = public.get(name, ((), ()))
            if len(means) != len(own):
                raise LayoutError(
                    f"{name}: found {len(own)} layers with running statistics, not {len(means)}"
                )
            for (found, views), *values in zip(own, means, variances, strict=True):
                for statistic, value in zip(STATISTICS, values, strict=True):
                    _compare(found, statistic, views[statistic], value)


def _compare(found: Found, name: str, view: Tensor, public: list[float]) -> None:
    """Raise LayoutError unless an array on the device is what the engine says."""
    if not np.array_equal(view.cpu().numpy(), np.asarray(public, np.float32), equal_nan=True):
        raise LayoutError(
            f"layer {found.layer.name}: {name} on the device is not what the engine says"
        )
