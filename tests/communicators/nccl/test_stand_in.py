"""The stand-ins for libcuda and libnccl do what the real libraries' public interfaces say."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.stand_in.build import build
from support.stand_in.client import IN_PROGRESS, Client, run_clients
from support.stand_in.programs import MAX, MIN, SUM, groups, operations, streams

Libraries = tuple[Path, Path]
FAULT = "TAGI_DDP_STAND_IN_FAULT"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = tmp_path_factory.mktemp("stand_in")
    return build(folder, omit=["ncclGetErrorString", "cuDeviceTotalMem_v2"])


# What ranks 0 and 1 see after a fault: the state, and whether what was started does not end.
FAULTS = {
    "=2": [(2, False), (2, False)],
    "=2@1": [(0, True), (2, False)],
    ":hang": [(0, True), (0, True)],
    ":async=6@1": [(0, True), (6, True)],
    ":progress": [(IN_PROGRESS, False), (IN_PROGRESS, False)],
}


def faulty(c: Client, fault: str, call: int) -> None:
    """Two operations, of which one fails."""
    values, (expected, hangs) = np.ones(8, "float32"), FAULTS[fault][c.rank]
    arguments = (values, values, 8, 7, SUM)
    comm, codes = c.connect(), [0]
    os.environ[FAULT] = f"ncclAllReduce{fault}#{call}"
    while codes[-1] == 0 and len(codes) < 3:
        limit = 0.1 if len(codes) == call and expected == IN_PROGRESS else 5
        codes.append(c.launch("ncclAllReduce", comm, *arguments, limit=limit))
    os.environ[FAULT] = ""
    event = c.mark(c.stream)
    assert c.pending(event, 0.1 if hangs else 5) == hangs
    assert codes[-1] == expected or c.until(lambda: c.state(comm) == expected, 5)
    if expected == IN_PROGRESS:
        assert c.launch("ncclAllReduce", comm, *arguments) == 5
    start = time.monotonic()
    c.check("ncclCommAbort", comm)
    assert not c.pending(event, 5)
    assert time.monotonic() - start < 2


def faults(c: Client) -> None:
    for fault in FAULTS:
        faulty(c, fault, 1)
        faulty(c, fault, 2)


def hangs(c: Client, fault: str) -> None:
    comm, values = c.connect(), np.ones(8, "float32")
    os.environ[FAULT] = fault
    if fault and c.rank == 1:
        os._exit(1)
    assert c.launch("ncclAllReduce", comm, values, values, 8, 7, MAX if c.rank else MIN) == 0
    event = c.mark(c.stream)
    assert c.pending(event, 0.1)
    assert c.until(lambda: c.state(comm) == (6 if fault else 0), 5)
    c.check("ncclCommAbort", comm)
    assert not c.pending(event, 1)


def other_faults(c: Client) -> None:
    """Faults of the start, of versions and of the driver."""
    for fault, code in ((":hang", IN_PROGRESS), (":async=2", 2), ("=3", 3)):
        os.environ[FAULT] = f"ncclCommInitRankConfig{fault}"
        begun, comm = c.begin()
        assert c.settle(begun, comm, limit=0.1 if fault == ":hang" else 5) == code
        assert c.nccl.ncclGetLastError(None) == b"stand-in: injected in ncclCommInitRankConfig"
        if begun == IN_PROGRESS:
            c.check("ncclCommAbort", comm)
    os.environ[FAULT] = "ncclGetVersion:value=21403#2,cuEventQuery=700@1#3,cuInit=999"
    version, context, event = ctypes.c_int(), ctypes.c_void_p(), c.new("cuEventCreate", 2)
    for expected in (22807, 21403):
        c.check("ncclGetVersion", ctypes.byref(version))
        assert version.value == expected
    assert [c.call("cuEventQuery", event) for _ in range(3)] == [0, 0, 700 * c.rank]
    assert c.call("cuInit", 0) == 999
    c.check("cuCtxPopCurrent_v2", ctypes.byref(context))
    assert c.call("cuStreamSynchronize", c.stream) == 201
    os.environ[FAULT] = ""
    assert c.begin()[0] == 1  # without a context
    assert not hasattr(c.nccl, "ncclGetErrorString")  # left out of the build
    assert not hasattr(c.cuda, "cuDeviceTotalMem_v2")


@pytest.mark.parametrize("dtype", ["int32", "float16"])
@pytest.mark.parametrize("size", [2, 4])
def test_operations(libraries: Libraries, size: int, dtype: str) -> None:
    run_clients(libraries, size, operations, dtype)


@pytest.mark.parametrize(("fault", "dying"), [("", None), ("remote", 1)])
def test_ranks_that_differ_or_die(libraries: Libraries, fault: str, dying: int | None) -> None:
    run_clients(libraries, 2, hangs, fault, dying=dying)


@pytest.mark.parametrize(
    ("size", "function"), [(2, groups), (4, groups), (2, streams), (2, faults), (2, other_faults)]
)
def test_behaviour(libraries: Libraries, size: int, function: Callable[[Client], None]) -> None:
    run_clients(libraries, size, function)
