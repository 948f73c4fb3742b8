"""Faults of NCCL or CUDA end in a typed error on every rank; on stand-ins for both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.failures import Report, report
from support.rank_pool import RankPool
from support.stand_in.build import build

from tagi_ddp.communicators import (
    BackendUnavailable,
    CommunicatorError,
    PeerLost,
    Timeout,
    init,
)
from tagi_ddp.communicators.control import handshake
from tagi_ddp.communicators.nccl import NcclMissing

LIMIT = 1.0  # of the communicator, in seconds
SLACK = 4.0  # of a busy machine, and for an engine's error to be explained

# Each calls one operation, by the NCCL function that it needs.
CALLS: dict[str, Callable[[Any], Any]] = {
    "ncclAllReduce": lambda c: c.all_reduce(ones()),
    "ncclBroadcast": lambda c: c.broadcast(ones()),
    "ncclAllGather": lambda c: c.all_gather(ones(), ones(8 * c.size)),
    "ncclReduceScatter": lambda c: c.reduce_scatter(ones(8 * c.size), ones()),
    "ncclAlltoAll": lambda c: c.all_to_all(ones(8 * c.size), ones(8 * c.size)),
    "ncclReduce": lambda c: c.reduce_scatter(
        ones(8 * c.size - 1), ones(8 - (c.rank == 0)), [7] + [8] * (c.size - 1)
    ),
    "ncclSend": lambda c: c.send(ones(), 0) if c.rank == 1 else c.rank or c.recv(ones(), 1),
    "ncclRecv": lambda c: c.recv(ones(), 0) if c.rank == 1 else c.rank or c.send(ones(), 1),
    "ncclGroupEnd": lambda c: c.all_reduce(ones()),
    "cuEventRecord": lambda c: c.all_reduce(ones()),
    "cuEventQuery": lambda c: c.all_reduce(ones()),
    "cuEventCreate": lambda c: c.all_reduce(ones()),
}


def ones(count: int = 8) -> np.ndarray:
    return np.ones(count, np.float32)


@contextlib.contextmanager
def fault(rank: int, text: str) -> Iterator[None]:
    handshake._GRACE = 0.3  # no message explains what happens here
    os.environ["TAGI_DDP_STAND_IN_FAULT"] = text
    os.environ["TAGI_DDP_STAND_IN_RANK"] = str(rank)
    try:
        yield
    finally:
        del os.environ["TAGI_DDP_STAND_IN_FAULT"], os.environ["TAGI_DDP_STAND_IN_RANK"]


def call_with_a_fault(comm: Any, call: Callable[[Any], Any], text: str) -> list[Report]:
    comm.all_reduce(ones())
    with fault(comm.rank, text):

        def run() -> None:
            call(comm)
            comm.barrier()  # for the ranks that have no part in a message

        return [report(run), report(comm.barrier)]


def fail_unseen(comm: Any, text: str) -> list[Report]:
    """Nothing waits for the operation that fails."""
    comm.all_reduce(ones())
    buffer = ones()
    with fault(comm.rank, text), contextlib.suppress(CommunicatorError):
        comm.all_reduce(buffer, async_op=True)  # may fail at once
        time.sleep(LIMIT + 1)
    return [report(lambda: comm.all_reduce(ones(), async_op=True)), report(comm.barrier)]


def fail_at_init(comm: Any, text: str, timeout: float) -> Report:
    with fault(comm.rank, text):
        return report(lambda: init_nccl(comm, timeout))


def init_nccl(comm: Any, timeout: float) -> Any:
    job = f"nccl of {os.environ['MASTER_PORT']}"
    return init("nccl", comm.rank, comm.size, job=job, timeout=timeout)


def exchange_over_nccl(comm: Any) -> tuple[list[float], str]:
    with init_nccl(comm, 20.0) as nccl:
        buffer, out = ones(comm.size) * (comm.rank + 1), ones(comm.size)
        nccl.all_to_all(buffer, out)
        return out.tolist(), nccl.device


Start = Callable[..., RankPool]


@pytest.fixture
def start(stand_in: dict[str, str], size: int) -> Iterator[Start]:
    """Yield a function that starts ranks that have not opened the stand-ins yet."""
    pools: list[RankPool] = []

    def make(**environment: str) -> RankPool:
        pools.append(RankPool("shm", size, environment={**stand_in, **environment}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.ranks("nccl", 3)
class TestFaults:
    @pytest.mark.parametrize("function", CALLS)
    def test_error_code(self, pool: RankPool, size: int, function: str) -> None:
        code = 2 if function.startswith("nccl") else 700
        rank = 0 if function == "ncclSend" else 1  # 0: of the two that the message is between
        text = f"{function}={code}@{rank}"
        answers = pool.run(
            call_with_a_fault, CALLS[function], text, size=size, fresh=True, timeout=20
        )
        for rank, (first, second) in enumerate(answers):
            kind, ranks, text, seconds = first
            if rank == 1:
                assert kind is CommunicatorError, text
                assert function in text or "cuEvent" in function
                assert "#" in text
                assert "rank 1 of 3 (nccl)" in text
                assert "stand-in" in text or "CUDA_ERROR" in text, text
            else:
                assert (kind, ranks) == (PeerLost, (1,)), text
            assert seconds < SLACK
            assert second[0] is kind

    @pytest.mark.parametrize("function", ["ncclAllReduce", "ncclBroadcast", "ncclAllGather"])
    def test_asynchronous_error(self, pool: RankPool, size: int, function: str) -> None:
        answers = pool.run(
            call_with_a_fault,
            CALLS[function],
            f"{function}:async=6@1",
            size=size,
            fresh=True,
            timeout=20,
        )
        for rank, (first, _) in enumerate(answers):
            kind, ranks, text, seconds = first
            assert seconds < SLACK
            if rank == 1:
                assert kind is CommunicatorError, text
                assert "asynchronous error" in text
            else:
                assert (kind, ranks) == (PeerLost, (1,)), text

    @pytest.mark.parametrize("rank", ["", "@1"])
    @pytest.mark.parametrize("fault", ["hang", "progress"])  # on the device; in NCCL's call
    @pytest.mark.parametrize("function", ["ncclAllReduce", "ncclAlltoAll"])
    def test_hang(self, pool: RankPool, size: int, function: str, fault: str, rank: str) -> None:
        text = f"{function}:{fault}{rank}"
        answers = pool.run(
            call_with_a_fault, CALLS[function], text, size=size, fresh=True, timeout=LIMIT
        )
        for kind, _, text, seconds in (first for first, _ in answers):
            assert kind in (Timeout, PeerLost), text
            assert seconds < LIMIT + SLACK
        assert any(first[0] is Timeout for first, _ in answers)

    @pytest.mark.parametrize("text", ["ncclAllReduce:async=6@1", "ncclAllReduce:hang@1"])
    def test_error_that_nothing_waits_for(self, pool: RankPool, size: int, text: str) -> None:
        answers = pool.run(fail_unseen, text, size=size, fresh=True, timeout=LIMIT)
        for first, second in answers:
            assert first[0] is second[0]
            assert first[3] < SLACK
            assert "failed before" in first[2]

    @pytest.mark.parametrize(
        ("text", "kinds", "words"),
        [
            ("cuInit=100", {BackendUnavailable}, ("cuInit", "NVIDIA")),
            ("cuDevicePrimaryCtxRetain=101@1", {BackendUnavailable}, ("rank 1", "cuda:1")),
            ("ncclGetVersion:value=21403", {NcclMissing}, ("2.14.3", "2.18")),
            ("ncclGetUniqueId=3", {CommunicatorError, PeerLost}, ("ncclGetUniqueId",)),
            ("ncclCommInitRankConfig=2@1", {CommunicatorError, PeerLost}, ("ncclCommInitRank",)),
            ("ncclCommSplit=2@1", {CommunicatorError, PeerLost}, ("ncclCommSplit",)),
            ("ncclCommSplit:async=6@1", {CommunicatorError, PeerLost}, ("asynchronous error",)),
            ("cuStreamCreateWithPriority=2@1", {CommunicatorError, PeerLost}, ("cuStream",)),
        ],
    )
    def test_init(
        self, start: Start, size: int, text: str, kinds: set[type], words: tuple[str, ...]
    ) -> None:
        answers = start().run(fail_at_init, text, 20.0, size=size)
        assert {kind for kind, *_ in answers} == kinds, answers
        for _, _, message, seconds in answers:
            assert all(word in message for word in words), message
            assert seconds < SLACK

    @pytest.mark.parametrize("function", ["ncclCommInitRankConfig", "ncclCommSplit"])
    def test_init_that_hangs(self, start: Start, size: int, function: str) -> None:
        text = f"{function}:hang@1"
        for kind, _, message, seconds in start().run(fail_at_init, text, LIMIT, size=size):
            assert kind in (Timeout, PeerLost), message
            assert "init" in message
            assert seconds < LIMIT + SLACK

    def test_part_of_the_devices(self, start: Start, size: int) -> None:
        """As launchers do that bind each rank to the devices near it: CUDA counts those from 0."""
        answers = start(TAGI_DDP_STAND_IN_DEVICES="2").run(exchange_over_nccl, size=size)
        devices = [f"cuda:{rank % 2}" for rank in range(size)]
        assert answers == [([1.0, 2.0, 3.0], device) for device in devices]

    def test_one_device_for_each_rank(self, start: Start, size: int) -> None:
        """As launchers do that hide the other ranks' devices."""
        answers = start(TAGI_DDP_STAND_IN_DEVICES="1").run(exchange_over_nccl, size=size)
        assert answers == [([1.0, 2.0, 3.0], "cuda:0")] * size

    @pytest.mark.parametrize("missing", ["ncclCommAbort", "cuEventQuery", "ncclAlltoAll"])
    @pytest.mark.slow
    def test_missing_function(self, start: Start, size: int, missing: str, tmp_path: Path) -> None:
        nccl, cuda = build(tmp_path, omit=[missing])
        pool = start(TAGI_DDP_LIBNCCL=str(nccl), TAGI_DDP_LIBCUDA=str(cuda))
        if missing == "ncclAlltoAll":  # newer than 2.18: sends and receives take its place
            answers = pool.run(exchange_over_nccl, size=size)
            assert answers == [([1.0, 2.0, 3.0], f"cuda:{rank}") for rank in range(size)]
        else:
            for kind, _, text, _ in pool.run(fail_at_init, "", 20.0, size=size):
                assert issubclass(kind, BackendUnavailable)
                assert f"has no function {missing}" in text
