"""The contract over NCCL's own library, on GPUs; and what its tests need there, without any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract.arguments import ArgumentsContract
from contract.operations import OperationsContract, properties
from contract.order import GroupContract, OrderContract
from contract.whole import SoloContract, WholeContract
from support.on_device import VARIABLE, gpus, why_not
from support.rank_pool import RankPool, doomed_pool

LONG = 1 << 30  # cycles of a GPU: about half a second


@pytest.fixture
def arguments(request: pytest.FixtureRequest, size: int) -> dict[str, dict[str, str]]:
    """Return arguments of RankPool for the test's class, by its ``place`` of the host's buffers."""
    place = request.cls.place
    if place == "copy":
        return {"environment": {**request.getfixturevalue("stand_in"), VARIABLE: place}}
    if reason := why_not(size):
        pytest.skip(reason)
    found = gpus(size)
    if place == "cuda":
        found["environment"][VARIABLE] = place
    return found


@pytest.fixture
def pool(
    request: pytest.FixtureRequest,
    arguments: dict[str, dict[str, str]],
    pools: dict[tuple[str, int], RankPool],
    size: int,
) -> RankPool:
    key = (f"nccl, {request.cls.place}", size)
    if key not in pools:
        pools[key] = RankPool("nccl", size, **arguments)
    return pools[key]


@pytest.fixture
def doomed(arguments: dict[str, dict[str, str]], size: int) -> Iterator[RankPool]:
    with doomed_pool("nccl", size, **arguments) as pool:
        yield pool


class TestOnDevice(OperationsContract, ArgumentsContract, OrderContract, GroupContract):
    """On stand-ins: what moves the tests' buffers changes nothing that they see."""

    backend = "nccl"
    sizes = (2,)
    place = "copy"
    test_misaligned = None


@pytest.mark.gpu
class TestNcclOnOneGpu(SoloContract):
    backend = "nccl"
    sizes = (1,)
    place = "cuda"
    test_misaligned = None


@pytest.mark.gpu
class TestNcclOnGpus(WholeContract):
    backend = "nccl"
    sizes = (2,)
    place = "cuda"
    test_misaligned = None
    test_fork = None  # torch refuses to work with CUDA in a fork

    def test_properties(self, pool: RankPool, size: int) -> None:
        shared = pool.settings("").get("device")
        devices = [shared or f"cuda:{rank}" for rank in range(size)]
        expected = [(rank, size, "nccl", device, 20.0) for rank, device in enumerate(devices)]
        assert pool.run(properties, size=size) == expected


class ByInterface:
    """An object that has a tensor's CUDA Array Interface and nothing else of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


class ByDlpack:
    """An object that gives a tensor's memory by DLPack alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__dlpack__ = tensor.__dlpack__
        self.__dlpack_device__ = tensor.__dlpack_device__


def reduce_foreign(comm: Any, kind: type, dtype: torch.dtype) -> None:
    values = torch.full((1000,), comm.rank + 1, dtype=dtype, device=comm.device)
    out = torch.zeros_like(values)
    comm.all_reduce(kind(values), out=kind(out))
    assert (values == comm.rank + 1).all()
    assert (out == comm.size * (comm.size + 1) // 2).all()


def group(comm: Any) -> None:
    tensors = [torch.full((n,), comm.rank + 1.0, device=comm.device) for n in (1, 70_001, 300)]
    with comm.group() as work:
        assert [comm.all_reduce(tensor) for tensor in tensors] == [None] * 3
    work.order()
    for tensor in tensors:
        assert (tensor == comm.size * (comm.size + 1) / 2).all()


def order(comm: Any, aside: bool, dtype: torch.dtype) -> bool:
    """Work before and after an operation, in one stream; tell whether the host was ahead of it."""
    device = torch.device(comm.device)
    stream = torch.cuda.Stream(device) if aside else torch.cuda.default_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        values = torch.zeros(1 << 20, dtype=dtype, device=device)

        def work() -> torch.Tensor:
            values.fill_(comm.rank + 1)
            comm.all_reduce(values, async_op=True).order()
            return values * 2

        work()  # loads kernels
        torch.cuda.synchronize()
        end = torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(LONG)
            result = work()
            end.record()
            ahead = not end.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (result == comm.size * (comm.size + 1)).all()
    return ahead


@pytest.mark.gpu
class TestDeviceBuffers:
    backend = "nccl"
    sizes = (1, 2)
    place = ""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
    @pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
    def test_foreign_buffers(
        self, pool: RankPool, size: int, kind: type, dtype: torch.dtype
    ) -> None:
        pool.run(reduce_foreign, kind, dtype, size=size)

    def test_group(self, pool: RankPool, size: int) -> None:
        pool.run(group, size=size)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("aside", [False, True])
    def test_order(self, pool: RankPool, size: int, aside: bool, dtype: torch.dtype) -> None:
        assert all(pool.run(order, aside, dtype, size=size))
