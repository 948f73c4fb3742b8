"""Groups, streams and foreign arrays of a communicator of devices: on stand-ins and on GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from contract.data import caught
from contract.ranks import Ranks
from support.rank_pool import RankPool
from support.waiting import no_waiting

from tagi_ddp.communicators import CommunicatorError, Mismatch, PeerLost, all_gather_object

COUNT = 50_000
LONG = 1 << 30  # cycles of a GPU: about half a second


class Foreign:
    """An array of another library, on a stream of its own."""

    def __init__(self, array: np.ndarray, stream: int | None = None, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, not array.flags.writeable),
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": 3,
            "stream": stream,
            **changes,
        }


class ByInterface:
    """A tensor's memory by the CUDA Array Interface and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        array: Any = tensor if tensor.is_cuda else Foreign(tensor.numpy())
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class ByDlpack:
    """A tensor's memory by DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__dlpack__ = tensor.__dlpack__
        self.__dlpack_device__ = tensor.__dlpack_device__


def total(comm: Any) -> int:
    return comm.size * (comm.size + 1) // 2


def memory_of(comm: Any, ranks: Ranks) -> torch.device:
    """Return the device of tensors for ``comm``; the host's memory stands in for a GPU's."""
    return torch.device(comm.device if ranks.gpu else "cpu")


def reduce_in_a_group(comm: Any, ranks: Ranks) -> None:
    device = memory_of(comm, ranks)
    tensors = [torch.full((n,), comm.rank + 1.0, device=device) for n in (1, 70_001, 300)]
    tensors.append(torch.full((7,), comm.rank + 1, dtype=torch.int16, device=device))
    own = torch.tensor([float(comm.rank)], device=device)
    gathered = torch.zeros(comm.size, device=device)
    with comm.group() as work:
        assert comm.all_reduce(tensors[0]) is None
        assert comm.all_reduce(tensors[1], async_op=True) is None
        assert [comm.all_reduce(tensor) for tensor in tensors[2:]] == [None] * 2
        assert comm.all_gather(own, gathered) is None
        assert "inside" in str(caught(lambda: comm.group().__enter__()))
    if ranks.gpu:
        work.order()  # the GPU's stream has the results; else the host reads them
    else:
        work.wait()
        assert work.done()
    for tensor in tensors:
        assert (tensor == total(comm)).all()
    assert gathered.tolist() == list(range(comm.size))
    with comm.group() as nothing:
        pass
    nothing.wait()
    assert nothing.done()
    with contextlib.suppress(KeyError), comm.group():
        comm.all_reduce(tensors[1])
        raise KeyError("a group that ends in an error does nothing")
    comm.barrier()
    assert (tensors[1] == total(comm)).all()


def reduce_foreign(comm: Any, ranks: Ranks, kind: type, dtype: torch.dtype) -> None:
    values = torch.full((COUNT,), comm.rank + 1, dtype=dtype, device=memory_of(comm, ranks))
    out = torch.zeros_like(values)
    comm.all_reduce(kind(values), out=kind(out))
    assert (values == comm.rank + 1).all()
    assert (out == total(comm)).all()
    comm.all_reduce(kind(values))
    assert (values == total(comm)).all()


def group_beside_another_thread(comm: Any) -> None:
    """Another thread's operation waits for the group's end, and is none of it."""
    one, two = np.ones(3), np.ones(3)
    with comm.group() as work:
        thread = threading.Thread(target=comm.all_reduce, args=(two,))
        thread.start()
        time.sleep(0.1)
        comm.all_reduce(one)
        assert two.tolist() == [1, 1, 1]
    work.wait()
    thread.join(10)
    assert one.tolist() == two.tolist() == [comm.size] * 3
    with comm.group():
        for call in (comm.barrier, lambda: comm.split(0), lambda: all_gather_object(comm, 1)):
            assert "inside of group" in str(caught(call))
        if comm.size > 1:
            other = (comm.rank + 1) % comm.size
            assert "inside of group" in str(caught(lambda: comm.send(one, other)))

    def streams() -> None:
        with comm.group():
            comm.all_reduce(Foreign(one, 1))
            comm.all_reduce(Foreign(two, 77))

    assert "2 streams" in str(caught(streams))
    comm.barrier()


def groups_that_differ(comm: Any) -> type:
    def run() -> None:
        with comm.group() as work:
            comm.all_reduce(np.ones(3))
            comm.all_reduce(np.ones(3 + comm.rank))
        work.wait()

    return type(caught(run))


def refuse_foreign(comm: Any) -> None:
    defects = {
        "contiguous": Foreign(np.ones((4, 6))[:, ::2]),
        "read-only": Foreign(np.frombuffer(bytes(8))),
        "complex64": Foreign(np.ones(3, np.complex64)),
        "Sequential": type("Sequential", (), {})(),
    }
    for word, array in defects.items():
        error = caught(lambda array=array: comm.all_reduce(array))
        assert isinstance(error, TypeError | ValueError), error
        assert word in str(error), error
        assert "buffer" in str(error)
    comm.barrier()


def in_host_memory(comm: Any) -> str:
    os.environ["TAGI_DDP_STAND_IN_FAULT"] = "cuPointerGetAttribute=1"
    try:
        return str(caught(lambda: comm.all_reduce(np.ones(3))))
    finally:
        del os.environ["TAGI_DDP_STAND_IN_FAULT"]


def streams(comm: Any) -> None:
    """An operation comes after what its caller's stream holds, and before what that gets later."""
    cuda = ctypes.CDLL(os.environ["TAGI_DDP_LIBCUDA"])
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), comm.rank)
    cuda.cuCtxPushCurrent_v2(context)
    cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0)

    def copy(target: np.ndarray, source: np.ndarray) -> None:
        addresses = (ctypes.c_uint64(array.ctypes.data) for array in (target, source))
        assert cuda.cuMemcpyAsync(*addresses, ctypes.c_size_t(source.nbytes), stream) == 0

    given, buffer = np.full(COUNT, comm.rank + 1.0), np.zeros(COUNT)
    results = [np.zeros(COUNT) for _ in range(5)]
    for result in results:
        copy(buffer, given)
        work = comm.all_reduce(Foreign(buffer, stream.value), async_op=True)
        work.order()
        copy(result, buffer)
    cuda.cuStreamSynchronize(stream)
    assert all((result == total(comm)).all() for result in results)
    work.wait(10)  # until the messages, too, have come
    assert work.done()
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))


def work_in_a_stream(comm: Any, aside: bool, dtype: torch.dtype) -> bool:
    """Work before and after an operation, in one stream. Return if the host was ahead of it."""
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
        with no_waiting():
            torch.cuda._sleep(LONG)
            result = work()
            end.record()
            ahead = not end.query()
        assert (result == 2 * total(comm)).all()
    return ahead


def never_waited_for(comm: Any) -> None:
    buffers = [np.full(100, comm.rank + i) for i in range(30)]
    for buffer in buffers:
        comm.all_reduce(buffer, async_op=True)
    deadline = time.monotonic() + 10
    while comm._pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not comm._pending, "buffers are kept"
    for i, buffer in enumerate(buffers):
        assert (buffer == sum(rank + i for rank in range(comm.size))).all()


def close_in_turn(comm: Any) -> float:
    """A rank that closes waits until the others are through with what it called, and no longer."""
    for i in range(3):
        comm.all_reduce(np.ones(COUNT), async_op=True)
        if comm.rank == 0 and i == 1:
            time.sleep(0.3)
    started = time.monotonic()
    comm.close()
    return time.monotonic() - started


def close_first(comm: Any) -> float:
    comm.all_reduce(np.ones(3))
    if comm.rank:
        time.sleep(2)
    started = time.monotonic()
    comm.close()
    return time.monotonic() - started


def gather_large_objects(comm: Any) -> list[Any]:
    values = all_gather_object(comm, {"rank": comm.rank, "text": "x" * 100_000})
    assert [len(value["text"]) for value in values] == [100_000] * comm.size
    return [value["rank"] for value in values]


@pytest.mark.ranks("nccl", 2, 3)
@pytest.mark.ranks("nccl", 1, 2, gpu=True)
class TestDeviceBuffers:
    """On tensors of the host, which stand in for a device's, and on those of GPUs."""

    def test_group(self, pool: RankPool, ranks: Ranks) -> None:
        pool.run(reduce_in_a_group, ranks, size=ranks.size)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
    @pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
    def test_foreign_buffers(
        self, pool: RankPool, ranks: Ranks, kind: type, dtype: torch.dtype
    ) -> None:
        pool.run(reduce_foreign, ranks, kind, dtype, size=ranks.size)


@pytest.mark.ranks("nccl", 1, 2, gpu=True)
class TestGpus:
    """On GPUs alone: torch widens 16 bits of foreign buffers there, and holds the streams."""

    @pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
    def test_foreign_buffers_of_16_bits(self, pool: RankPool, ranks: Ranks, kind: type) -> None:
        pool.run(reduce_foreign, ranks, kind, torch.float16, size=ranks.size)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("aside", [False, True])
    def test_order(self, pool: RankPool, size: int, aside: bool, dtype: torch.dtype) -> None:
        assert all(pool.run(work_in_a_stream, aside, dtype, size=size))


@pytest.mark.ranks("nccl", 2, 3)
class TestDevices:
    """On stand-ins alone."""

    def test_group_beside_another_thread(self, pool: RankPool, size: int) -> None:
        pool.run(group_beside_another_thread, size=size)

    def test_groups_that_differ(self, pool: RankPool, size: int) -> None:
        assert set(pool.run(groups_that_differ, size=size, fresh=True)) == {Mismatch}

    def test_foreign_arrays_are_refused(self, pool: RankPool, size: int) -> None:
        pool.run(refuse_foreign, size=size)

    def test_host_memory_is_refused(self, pool: RankPool, size: int) -> None:
        for rank, text in enumerate(pool.run(in_host_memory, size=size)):
            assert "buffer lives in the host's memory" in text
            assert f"live on cuda:{rank}; copy it there" in text

    def test_streams(self, pool: RankPool, size: int) -> None:
        pool.run(streams, size=size)

    def test_buffers_go_when_nothing_waits(self, pool: RankPool, size: int) -> None:
        pool.run(never_waited_for, size=size)

    def test_close(self, pool: RankPool, size: int) -> None:
        assert max(pool.run(close_in_turn, size=size, fresh=True)) < 5

    def test_close_first(self, pool: RankPool, size: int) -> None:
        """The others answer, though they go on with something else."""
        assert pool.run(close_first, size=size, fresh=True)[0] < 1.5

    def test_objects_go_over_the_hosts(self, pool: RankPool, size: int) -> None:
        assert pool.run(gather_large_objects, size=size) == [list(range(size))] * size

    def test_begins_nothing_after_another_has_failed(self, pool: RankPool, size: int) -> None:
        """Its part there may still be on the device, and would let the operation end well."""
        assert pool.run(begun_after_abort, size=size, fresh=True)[1:] == [PeerLost] * (size - 1)

    def test_use_after_an_error(self, pool: RankPool, size: int) -> None:
        for first, second in pool.run(use_after_abort, size=size, fresh=True):
            assert issubclass(first, CommunicatorError)
            assert second is first


def begun_after_abort(comm: Any) -> type | None:
    if comm.rank == 0:
        comm.abort("enough")
        return None
    time.sleep(0.5)
    return type(caught(lambda: comm.all_reduce(np.ones(3), async_op=True)))


def use_after_abort(comm: Any) -> tuple[type, type]:
    buffer = np.ones(3)
    comm.all_reduce(buffer)
    comm.barrier()
    if comm.rank == 0:
        comm.abort("enough")
    work = None
    with contextlib.suppress(CommunicatorError):
        work = comm.all_reduce(buffer, async_op=True)
    first = caught(work.wait if work else lambda: comm.all_reduce(buffer))

    def grouped() -> None:
        with comm.group():
            comm.all_reduce(buffer)

    return type(first), type(caught(grouped))
