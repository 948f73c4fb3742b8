"""Buffers of the host for a communicator whose buffers live on a device.

The contract's tests pass numpy arrays and tensors of the CPU. `OnDevice` copies them to the device,
calls the operation there, and copies them back when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tagi_ddp import communicators
from tagi_ddp.communicators import BackendUnavailable, CommunicatorError

Place = Callable[[torch.Tensor], torch.Tensor]

VARIABLE = "RANK_POOL_ON_DEVICE"
_LIBRARIES = ("TAGI_DDP_LIBNCCL", "TAGI_DDP_LIBCUDA")
_FIRST_THAT_SHARES = 23000  # as NCCL numbers its versions


def why_not(ranks: int) -> str:
    """Return why so many ranks cannot run on this machine's GPUs, or ""."""
    from tagi_ddp.communicators.nccl.libraries import open_cuda, open_nccl

    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        devices, version = open_cuda().device_count, open_nccl().version
    except BackendUnavailable as error:
        return str(error)
    if devices < ranks and version < _FIRST_THAT_SHARES:
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"{ranks} ranks share {devices} GPUs with NCCL 2.30 or newer only, not {text}"
    return ""


def on_gpu(*values: Any) -> Any:
    """Return these values of a test's parameters, for machines with a GPU only."""
    there = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
    return pytest.param(*values, marks=[pytest.mark.gpu, there])


def gpus(ranks: int) -> dict[str, dict[str, str]]:
    """Return arguments of RankPool for ranks on GPUs: a GPU each or, if those are too few, one."""
    from tagi_ddp.communicators.nccl.libraries import open_cuda

    environment = {name: os.environ[name] for name in _LIBRARIES if name in os.environ}
    if open_cuda().device_count >= ranks:
        return {"environment": environment}
    environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return {"environment": environment, "options": {"device": "cuda:0"}}


def init(*args: Any, **options: Any) -> Any:
    """Return what the package's init() does; over NCCL, if the variable is set, for host buffers.

    The variable says where the communicator's own buffers live: "cuda" is its device; "copy" is
    other memory of the host, which stand-ins take for a device's.
    """
    comm = communicators.init(*args, **options)
    place = os.environ.get(VARIABLE)
    if comm.backend != "nccl" or place is None:
        return comm
    places: dict[str, Place] = {"cuda": lambda t: t.to(comm.device), "copy": torch.clone}
    return OnDevice(comm, places[place])


@dataclass(frozen=True)
class Area:
    """Memory of the host: addresses from ``begin`` up to ``end``."""

    begin: int
    end: int

    def __or__(self, other: Area) -> Area:
        return Area(min(self.begin, other.begin), max(self.end, other.end))

    def overlaps(self, other: Area) -> bool:
        return self.begin < other.end and other.begin < self.end

    def contains(self, other: Area) -> bool:
        return self.begin <= other.begin and other.end <= self.end

    def bytes(self) -> torch.Tensor:
        """Return its bytes, [end - begin], which may be written to."""
        count = self.end - self.begin
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_char * count).from_address(self.begin), dtype=torch.uint8)


class Copy:
    """A copy of an area on the device."""

    def __init__(self, area: Area, place: Place) -> None:
        self.area = area
        self.bytes = place(area.bytes())


@dataclass
class Description:
    """The layout of a buffer in the host's memory; strides in elements."""

    area: Area
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    read_only: bool = False

    def in_copy(self, copy: Copy) -> Any:
        """Return the same buffer, with all its defects, in a copy of its area, or of more."""
        begin = self.area.begin - copy.area.begin
        part = copy.bytes[begin : begin + self.area.end - self.area.begin].view(self.dtype)
        tensor = part.as_strided(self.shape, self.strides)
        tensor.requires_grad_(self.requires_grad)
        return ReadOnly(tensor) if self.read_only else tensor


class ReadOnly:
    """A tensor's memory by the CUDA Array Interface, not to be written to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": str(torch.empty(0, dtype=tensor.dtype).numpy().dtype.str),
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        }


def describe(buffer: Any) -> Description | None:
    """Describe an array or a tensor of the CPU; None for what no tensor can be, or need be."""
    if isinstance(buffer, np.ndarray):
        try:
            dtype = torch.from_numpy(np.empty(0, buffer.dtype)).dtype
        except (TypeError, ValueError):  # no such type, or swapped bytes
            return None
        address, strides = buffer.ctypes.data, [n // buffer.itemsize for n in buffer.strides]
        flags = {"read_only": not buffer.flags.writeable}
    elif isinstance(buffer, torch.Tensor) and not buffer.is_cuda:
        dtype, address, strides = buffer.dtype, buffer.data_ptr(), list(buffer.stride())
        flags = {"requires_grad": buffer.requires_grad}
    else:
        return None
    if min(strides, default=0) < 0:
        return None
    shape = tuple(buffer.shape)
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    area = Area(address, address + (0 if 0 in shape else last + 1) * dtype.itemsize)
    return Description(area, dtype, shape, tuple(strides), **flags)


@dataclass
class Operation:
    """An operation on copies: a `Work` that copies back once.

    It keeps its ``buffers``, so that no other can take their place in memory.
    """

    settle: Callable[[], None]
    copies: list[Copy] = field(default_factory=list)
    buffers: tuple[Any, ...] = ()
    work: Any = None

    def wait(self, timeout: float | None = None) -> None:
        self.work.wait(timeout)
        self.settle()

    def done(self) -> bool:
        if not self.work.done():
            return False
        self.settle()
        return True

    def order(self) -> None:
        self.work.order()
        self.wait()  # the host is the one to read the result

    def copy_back(self) -> None:
        """Copy all that was written to, even what should not have been, to the host."""
        for copy in self.copies:
            here, there = copy.area.bytes(), copy.bytes.cpu()
            if not torch.equal(here, there):  # memory may be read-only
                here.copy_(there)


class OnDevice:
    """A communicator for buffers of the host over one for buffers of a device."""

    def __init__(self, comm: Any, place: Place) -> None:
        """Wrap ``comm``; ``place`` copies a tensor to where its buffers live."""
        self._comm = comm
        self._place = place
        self.rank, self.size = comm.rank, comm.size
        self.backend, self.device = comm.backend, comm.device
        self._under_way: list[Operation] = []
        self._grouped: list[Operation] | None = None
        place(torch.empty(1))  # the first use of a device takes longer than some tests' limits

    @property
    def timeout(self) -> float:
        return self._comm.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._comm.timeout = seconds

    def empty(self, *args: Any) -> Any:
        return self._comm.empty(*args)

    def all_reduce(self, buffer: Any, *args: Any, out: Any = None, **options: Any) -> Any:
        def call(buffer: Any, out: Any = None) -> Any:
            return self._comm.all_reduce(buffer, *args, out=out, **options)

        return self._run(call, buffer) if out is None else self._run(call, buffer, out)

    def broadcast(self, buffer: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda b: self._comm.broadcast(b, *args, **options), buffer)

    def all_gather(self, buffer: Any, out: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda *b: self._comm.all_gather(*b, *args, **options), buffer, out)

    def reduce_scatter(self, buffer: Any, out: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda *b: self._comm.reduce_scatter(*b, *args, **options), buffer, out)

    def all_to_all(self, buffer: Any, out: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda *b: self._comm.all_to_all(*b, *args, **options), buffer, out)

    def send(self, buffer: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda b: self._comm.send(b, *args, **options), buffer)

    def recv(self, buffer: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda b: self._comm.recv(b, *args, **options), buffer)

    def barrier(self, **options: Any) -> None:
        self._comm.barrier(**options)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._comm.all_gather_object(value)

    @contextlib.contextmanager
    def group(self) -> Iterator[Operation]:
        whole, members = Operation(self._settle), []
        with self._comm.group() as whole.work:
            self._grouped = members
            try:
                yield whole
            finally:
                self._grouped = None
        for member in members:
            member.work = whole.work
        self._under_way += members

    def split(self, *args: Any) -> OnDevice | None:
        part = self._comm.split(*args)
        return None if part is None else OnDevice(part, self._place)

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:
        self._comm.abort(reason, ranks)

    def check(self) -> None:
        self._comm.check()

    def close(self) -> None:
        self._comm.close()

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *error: Any) -> None:
        self._comm.__exit__(*error)

    def _run(self, call: Callable[..., Any], *buffers: Any) -> Any:
        self._settle()
        found = {index: describe(buffer) for index, buffer in enumerate(buffers)}
        known = {index: each for index, each in found.items() if each is not None}
        if not known:
            return call(*buffers)
        copies = self._copy([each.area for each in known.values()])
        placed = list(buffers)
        for (index, each), copy in zip(known.items(), copies, strict=True):
            placed[index] = each.in_copy(copy)
        operation = Operation(self._settle, copies, buffers)
        operation.work = call(*placed)
        if self._grouped is not None:
            self._grouped.append(operation)
            return None
        if operation.work is None:
            self._settle()
            operation.copy_back()
            return None
        self._under_way.append(operation)
        return operation

    def _copy(self, areas: list[Area]) -> list[Copy]:
        """Return a copy for each area, the same one for areas that overlap.

        A copy that an operation under way has is used again: what comes next goes on from there.
        """
        if len(areas) == 2 and areas[0].overlaps(areas[1]):
            areas = [areas[0] | areas[1]] * 2
        others = [copy for each in self._under_way + (self._grouped or []) for copy in each.copies]
        copies: list[Copy] = []
        for area in areas:
            found = [copy for copy in others + copies if copy.area.overlaps(area)]
            if any(not copy.area.contains(area) for copy in found):
                raise NotImplementedError("a part of the buffer is under way")
            copies.append(found[-1] if found else Copy(area, self._place))
        return copies

    def _settle(self) -> None:
        """Copy back what is complete."""
        for operation in list(self._under_way):
            if operation.work.done():
                self._under_way.remove(operation)
                with contextlib.suppress(CommunicatorError):
                    operation.work.wait()
                    operation.copy_back()
