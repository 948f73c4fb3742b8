"""Buffers of the host for a communicator whose buffers live on a device.

The contract's tests pass numpy arrays and tensors of the CPU. `OnDevice` copies them to the device,
calls the operation there, and copies the result back when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tagi_ddp.communicators import BackendUnavailable, CommunicatorError, factory

VARIABLE = "RANK_POOL_ON_DEVICE"
# The place of a communicator's buffers, by the variable's value: its device or, where stand-ins
# take host memory for the device's, other memory of the host.
PLACES: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "cuda": lambda comm: lambda tensor: tensor.to(comm.device),
    "copy": lambda comm: torch.Tensor.clone,
}
SHARING = 23000  # the first NCCL in which ranks can share a GPU, an experiment of its authors
LIBRARIES = ("TAGI_DDP_LIBNCCL", "TAGI_DDP_LIBCUDA")


def why_not(ranks: int) -> str:
    """Return why so many ranks cannot run on the GPUs of this machine, or ""."""
    from tagi_ddp.communicators.nccl.libraries import open_cuda, open_nccl

    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        devices, version = open_cuda().device_count, open_nccl().version
    except BackendUnavailable as error:
        return str(error)
    if ranks > devices and version < SHARING:
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"NCCL {text}: ranks can share a GPU from 2.30 on"
    return ""


def gpu_pool(ranks: int) -> dict[str, dict[str, str]]:
    """Return arguments of RankPool for ranks on GPUs: one each or, if those are too few, the first.

    Call it only where `why_not` finds nothing.
    """
    environment = {name: os.environ[name] for name in LIBRARIES if name in os.environ}
    if torch.cuda.device_count() >= ranks:
        return {"environment": environment, "options": {}}
    environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return {"environment": environment, "options": {"device": "cuda:0"}}


def install() -> None:
    """Let init() wrap every communicator over NCCL in this process, as the variable asks."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        return
    plain = factory.init

    @functools.wraps(plain)
    def init(*args: Any, **options: Any) -> Any:
        comm = plain(*args, **options)
        return OnDevice(comm, PLACES[chosen](comm)) if comm.backend == "nccl" else comm

    factory.init = init


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
        """Return its bytes, [end - begin]."""
        count = self.end - self.begin
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_char * count).from_address(self.begin), dtype=torch.uint8)


class Copy:
    """A copy of an area on the device."""

    def __init__(self, area: Area, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.area = area
        self.bytes = place(area.bytes())

    def part(self, area: Area) -> torch.Tensor:
        """Return the copy of the bytes of an area inside of this one."""
        return self.bytes[area.begin - self.area.begin : area.end - self.area.begin]


class Described:
    """A buffer on the host: where it is, and how its elements lie there."""

    def __init__(self, buffer: Any) -> None:
        """Raise TypeError or ValueError for what torch could not have in memory."""
        if isinstance(buffer, np.ndarray):
            self.dtype = torch.from_numpy(np.empty(0, buffer.dtype)).dtype
            self.strides = [stride // buffer.itemsize for stride in buffer.strides]
            address, self.read_only = buffer.ctypes.data, not buffer.flags.writeable
            self.type_text = buffer.dtype.str
        elif isinstance(buffer, torch.Tensor) and buffer.layout == torch.strided:
            self.dtype, self.strides = buffer.dtype, list(buffer.stride())
            address, self.read_only = buffer.data_ptr(), False
        else:
            raise TypeError("neither an array nor a tensor")
        if torch.device("cpu") != getattr(buffer, "device", torch.device("cpu")):
            raise ValueError("on a device")
        if min(self.strides, default=0) < 0:
            raise ValueError("torch has no negative strides")
        self.shape = list(buffer.shape)
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        elements = 0 if 0 in self.shape else last + 1
        self.area = Area(address, address + elements * self.dtype.itemsize)

    def on_device(self, copy: Copy) -> Any:
        """Return the same buffer in a copy of its area, with the same defects."""
        flat = copy.part(self.area).view(self.dtype)
        tensor = flat.as_strided(self.shape, self.strides)
        return ReadOnly(tensor, self.type_text) if self.read_only else tensor


class ReadOnly:
    """A tensor's memory, by the CUDA Array Interface, not to be written to."""

    def __init__(self, tensor: torch.Tensor, type_text: str) -> None:
        self._tensor = tensor
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": type_text,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": None if tensor.is_contiguous() else strides,
        }


class Operation:
    """An operation on copies; a `Work`, whose results are copied back once."""

    def __init__(self, comm: OnDevice, copies: list[Copy], written: Area | None) -> None:
        self.copies = copies
        self._comm = comm
        self._written = written
        self.work: Any = None

    def wait(self, timeout: float | None = None) -> None:
        self.work.wait(timeout)
        self._comm.settle()

    def done(self) -> bool:
        if not self.work.done():
            return False
        self._comm.settle()
        return True

    def order(self) -> None:
        self.work.order()
        self._comm.settle(self)

    def copy_back(self) -> None:
        """Copy what the operation has written to the host, in the device's present stream."""
        written = self._written
        if written is not None and written.begin < written.end:
            copy = next(copy for copy in self.copies if copy.area.contains(written))
            written.bytes().copy_(copy.part(written))


class OnDevice:
    """A communicator for buffers of the host over one for buffers of a device."""

    def __init__(self, comm: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Wrap ``comm``; ``place`` copies a tensor to where its buffers live."""
        self._comm = comm
        self._place = place
        self.rank, self.size, self.timeout = comm.rank, comm.size, comm.timeout
        self.backend, self.device = comm.backend, comm.device
        self._under_way: list[Operation] = []
        self._grouped: list[Operation] | None = None
        place(torch.empty(1))  # a device's first use takes a while, which no limit should count

    def all_reduce(self, buffer: Any, op: Any = "sum", *, out: Any = None, **options: Any) -> Any:
        if out is None:
            return self._run(lambda b: self._comm.all_reduce(b, op, **options), [buffer], buffer)
        return self._run(
            lambda b, o: self._comm.all_reduce(b, op, out=o, **options), [buffer, out], out
        )

    def broadcast(self, buffer: Any, *args: Any, **options: Any) -> Any:
        written = None if self._is_read_only(buffer) else buffer
        return self._run(lambda b: self._comm.broadcast(b, *args, **options), [buffer], written)

    def all_gather(self, buffer: Any, out: Any, *args: Any, **options: Any) -> Any:
        return self._between("all_gather", buffer, out, *args, **options)

    def reduce_scatter(self, buffer: Any, out: Any, *args: Any, **options: Any) -> Any:
        return self._between("reduce_scatter", buffer, out, *args, **options)

    def all_to_all(self, buffer: Any, out: Any, *args: Any, **options: Any) -> Any:
        return self._between("all_to_all", buffer, out, *args, **options)

    def send(self, buffer: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda b: self._comm.send(b, *args, **options), [buffer], None)

    def recv(self, buffer: Any, *args: Any, **options: Any) -> Any:
        return self._run(lambda b: self._comm.recv(b, *args, **options), [buffer], buffer)

    def barrier(self, **options: Any) -> None:
        self._comm.barrier(**options)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._comm.all_gather_object(value)

    @contextlib.contextmanager
    def group(self) -> Iterator[Operation]:
        whole = Operation(self, [], None)
        with self._comm.group() as whole.work:
            self._grouped = []
            try:
                yield whole
            finally:
                members, self._grouped = self._grouped, None
        for member in members:
            member.work = whole.work
        self._under_way += members

    def split(self, *args: Any) -> OnDevice | None:
        part = self._comm.split(*args)
        return None if part is None else OnDevice(part, self._place)

    def abort(self, reason: str) -> None:
        self._comm.abort(reason)

    def close(self) -> None:
        self._comm.close()

    def __enter__(self) -> OnDevice:
        self._comm.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._comm.__exit__(*error)

    def settle(self, ordered: Operation | None = None) -> None:
        """Copy back what is complete, and what comes before the present stream's next work."""
        for operation in list(self._under_way):
            if operation is not ordered and not operation.work.done():
                continue
            self._under_way.remove(operation)
            with contextlib.suppress(CommunicatorError):
                operation.work.wait()
                operation.copy_back()

    def _between(self, name: str, buffer: Any, out: Any, *args: Any, **options: Any) -> Any:
        call = getattr(self._comm, name)
        return self._run(lambda b, o: call(b, o, *args, **options), [buffer, out], out)

    def _run(self, call: Callable[..., Any], buffers: list[Any], written: Any) -> Any:
        self.settle()
        described = [_describe(buffer) for buffer in buffers]
        copies = self._copies([each.area for each in described if each is not None])
        found = iter(copies)
        placed = [
            buffer if each is None else each.on_device(next(found))
            for buffer, each in zip(buffers, described, strict=True)
        ]
        target = _describe(written)
        operation = Operation(self, copies, None if target is None else target.area)
        operation.work = call(*placed)
        if self._grouped is not None:
            self._grouped.append(operation)
            return None
        if operation.work is None:
            self.settle()
            operation.copy_back()
            return None
        self._under_way.append(operation)
        return operation

    def _copies(self, areas: list[Area]) -> list[Copy]:
        """Return a copy for each area, one for two that overlap.

        What is under way may still write to its copies, which so hold what comes next.
        """
        if len(areas) == 2 and areas[0].overlaps(areas[1]):
            areas = [areas[0] | areas[1]] * 2
        made: dict[Area, Copy] = {}
        under_way = [copy for other in self._under_way + (self._grouped or []) for copy in other.copies]
        for area in areas:
            for copy in under_way:
                if copy.area.contains(area):
                    made[area] = copy
                elif copy.area.overlaps(area):
                    raise NotImplementedError("a buffer that overlaps one under way")
            if area not in made:
                made[area] = Copy(area, self._place)
        return [made[area] for area in areas]
