"""Stand-ins for the engine's layers on a GPU: their memory as its source lays it out.

An object begins with the address of its class's table in the engine's own library, as a real one
does. Numbers are offsets in bytes, written down apart from those of the backend. "Device" memory
is numpy arrays of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tagi_ddp.engine.layers import DELTAS, PARAMETERS
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.replica.cuda import CudaReplica

Floats = np.ndarray[Any, np.dtype[np.float32]]

NUM_WEIGHTS, NUM_BIASES, BIAS, DEVICE, NUM_THREADS = 24, 32, 88, 100, 304
VECTORS, POINTERS, BLOCK, RESIDUAL = 104, 344, 344, 424
STATISTICS_VECTORS, STATISTICS_POINTERS, FIRST_BATCH = 424, 520, 568
SIZE = 640  # more than any of the objects has


class DeviceMemory:
    """Memory of a device, of which the host's arrays are lent."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.arrays: list[Floats] = []
        self.number: int | None = None
        self.is_ordered = False

    def __call__(self, number: int) -> DeviceMemory:
        """Be the memory of the device with a number."""
        self.number = number
        return self

    def new(self, values: Any) -> Floats:
        """Return an array on the device."""
        self.arrays.append(np.array(values, np.float32))
        return self.arrays[-1]

    def owns(self, address: int, count: int) -> bool:
        begins = [(array.ctypes.data, array) for array in self.arrays]
        return any(
            begin <= address and address + 4 * count <= begin + array.nbytes
            for begin, array in begins
        )

    def tensor_at(self, address: int, count: int) -> torch.Tensor:
        assert self.owns(address, count)
        return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        self.is_ordered = True
        yield
        self.is_ordered = False


class Object:
    """The memory of an engine object of a class."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.bytes = np.zeros(SIZE, np.uint8)
        self.kept: list[Any] = []  # what the memory points to
        self.address = self.bytes.ctypes.data
        self.write(0, "<u8", table_of(kind))

    def write(self, offset: int, dtype: str, *values: Any) -> None:
        part = self.bytes[offset : offset + np.dtype(dtype).itemsize * len(values)]
        part.view(dtype)[:] = values

    def read(self, offset: int) -> int:
        return int(self.bytes[offset : offset + 8].view("<u8")[0])

    def point(self, offset: int, array: Any) -> None:
        """Write a pointer to an array."""
        self.kept.append(array)
        self.write(offset, "<u8", array.ctypes.data)

    def vector(self, offset: int, array: Any) -> None:
        """Write a vector: its begin, its end, and the end of its memory."""
        self.point(offset, array)
        end = array.ctypes.data + array.nbytes
        self.write(offset + 8, "<u8", end, end)

    @property
    def handle(self) -> Handle:
        """What Python knows of it."""
        return Handle(self)


class Layer(Object):
    """A layer with parameters, drawn at random."""

    def __init__(
        self,
        kind: str,
        weights: int,
        biases: int,
        memory: DeviceMemory,
        rng: np.random.Generator,
        bias: bool = True,
    ) -> None:
        super().__init__(kind)
        self.write(NUM_WEIGHTS, "<u8", weights)
        self.write(NUM_BIASES, "<u8", biases if bias else 0)
        self.write(BIAS, "?", bias)
        self.write(DEVICE, "<i4", 3)
        self.write(NUM_THREADS, "<u4", 4)
        self.host: dict[str, Floats] = {}
        self.on_device: dict[str, Floats] = {}
        for index, name in enumerate(PARAMETERS + DELTAS):
            count = weights if name.endswith("_w") else biases
            values = rng.normal(size=count).astype(np.float32)
            if name.startswith("var"):
                values = values**2 + np.float32(0.1)
            self.host[name] = values.copy() if name in PARAMETERS else np.zeros_like(values)
            self.vector(VECTORS + 24 * index, self.host[name])
            if count and (bias or name.endswith("_w")):
                self.on_device[name] = memory.new(values)
                self.point(POINTERS + 8 * index, self.on_device[name])

    def to_host(self) -> None:
        """Copy the parameters, as the engine does before it shows them."""
        for name in PARAMETERS:
            if name in self.on_device:
                self.host[name][:] = self.on_device[name]


class BatchNorm(Layer):
    """Batch normalization, with running statistics."""

    def __init__(self, features: int, memory: DeviceMemory, rng: np.random.Generator) -> None:
        super().__init__("BatchNorm2dCuda", features, features, memory, rng)
        for index, name in enumerate(("mu_ra", "var_ra")):
            values = rng.gamma(1, size=features).astype(np.float32)
            self.host[name], self.on_device[name] = np.zeros_like(values), memory.new(values)
            self.vector(STATISTICS_VECTORS + 24 * index, self.host[name])
            self.point(STATISTICS_POINTERS + 8 * index, self.on_device[name])
        self.write(FIRST_BATCH, "?", True)

    def statistics_to_host(self) -> None:
        """Copy the running statistics."""
        for name in ("mu_ra", "var_ra"):
            self.host[name][:] = self.on_device[name]


class LayerBlock(Object):
    """A block of layers."""

    def __init__(self, *layers: Object) -> None:
        super().__init__("LayerBlock")
        self.layers = layers
        # Shared pointers: an object, and what counts its owners.
        self.vector(BLOCK, np.array([[layer.address, 1] for layer in layers], np.uint64))


class ResNetBlock(Object):
    """A block with a shortcut, or none."""

    def __init__(self, main_block: Object, shortcut: Object | None = None) -> None:
        super().__init__("ResNetBlockCuda")
        self.layers = (main_block,) if shortcut is None else (main_block, shortcut)
        for index, layer in enumerate(self.layers):
            self.write(RESIDUAL + 16 * index, "<u8", layer.address, 1)


class Handle:
    """An object in Python, which tells its address as pybind11's do."""

    def __init__(self, layer: Object) -> None:
        self._layer = layer

    def _pybind11_conduit_v1_(self, abi: bytes, info: Any, kind: bytes) -> Any:
        new = ctypes.PYFUNCTYPE(
            ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        )(("PyCapsule_New", ctypes.pythonapi))
        return new(self._layer.address, b"type", None)

    def get_layer_info(self) -> str:
        return f"{self._layer.kind.removesuffix('Cuda')}()"

    @property
    def num_threads(self) -> int:
        return 4


class Model:
    """A Sequential of stand-ins."""

    device = "cuda"

    def __init__(self, *layers: Object) -> None:
        self.objects = layers
        self._cpp_backend = SimpleNamespace(layers=[layer.handle for layer in layers])

    def state_dict(self) -> dict[str, tuple[list[float], ...]]:
        state = {}
        for key, layer in self.leaves():
            if isinstance(layer, Layer):
                layer.to_host()
                state[f"{layer.kind}.{key}"] = tuple(layer.host[n].tolist() for n in PARAMETERS)
        return state

    def get_norm_mean_var(self) -> dict[str, tuple[list[list[float]], ...]]:
        public: dict[str, tuple[list[list[float]], ...]] = {}
        for key, layer in self.leaves():
            if isinstance(layer, BatchNorm):
                layer.statistics_to_host()
                index = next(part for part in key.split(".") if part.isdigit())
                info = self._cpp_backend.layers[int(index)].get_layer_info()
                entry = public.setdefault(f"{info}_{index}", ([], [], [], []))
                entry[0].append(layer.host["mu_ra"].tolist())
                entry[1].append(layer.host["var_ra"].tolist())
        return public

    def leaves(self) -> list[tuple[str, Object]]:
        """Return the layers inside of all blocks, by what the engine adds to their names."""
        return [pair for i, layer in enumerate(self.objects) for pair in _leaves(layer, str(i))]


def _leaves(layer: Object, suffix: str) -> list[tuple[str, Object]]:
    if isinstance(layer, LayerBlock):
        suffixes = [f"{suffix}.{i}" for i in range(len(layer.layers))]
    elif isinstance(layer, ResNetBlock):
        suffixes = [f"main.{suffix}", f"shortcut.{suffix}"]
    else:
        return [(suffix, layer)]
    return [
        pair
        for name, inner in zip(suffixes, layer.layers, strict=False)
        for pair in _leaves(inner, name)
    ]


class Network:
    """A network with every kind of nesting, and where its parts are."""

    def __init__(self, seed: int = 0) -> None:
        self.memory = DeviceMemory()
        rng = np.random.default_rng(seed)

        def layer(kind: str, weights: int, biases: int, bias: bool = True) -> Layer:
            return Layer(kind, weights, biases, self.memory, rng, bias)

        self.linear = layer("LinearCuda", 12, 3, bias=False)
        self.norms = [BatchNorm(n, self.memory, rng) for n in (4, 5, 2)]
        inner = ResNetBlock(LayerBlock(layer("Conv2dCuda", 9, 1)), self.norms[1])
        main_block = LayerBlock(layer("Conv2dCuda", 18, 2), self.norms[0], inner)
        self.residual = ResNetBlock(main_block, LayerBlock(layer("Conv2dCuda", 27, 3)))
        self.block = LayerBlock(ResNetBlock(layer("Conv2dCuda", 4, 1)))
        self.embedding = layer("EmbeddingCuda", 20, 0)
        self.model = Model(
            self.linear,
            Object("ReLUCuda"),
            self.residual,
            self.block,
            self.norms[2],
            self.embedding,
        )
        self.leaves = [leaf for _, leaf in self.model.leaves() if isinstance(leaf, Layer)]

    def replica(self) -> CudaReplica:
        return CudaReplica(self.model, self.memory)

    def on_device(self) -> list[np.ndarray]:
        return [array.copy() for array in self.memory.arrays]


@functools.cache
def table_of(kind: str) -> int:
    """Return what the engine's objects of a class begin with."""
    load_engine()
    import cutagi

    table = ctypes.c_char.in_dll(ctypes.CDLL(cutagi.__file__), f"_ZTV{len(kind)}{kind}")
    return ctypes.addressof(table) + 16
