"""A process that calls the stand-ins by ctypes.

``python client.py <nccl> <cuda> <rank> <size> <run>`` reads a pickled function from standard input,
calls it with its `Client` and writes what that returns to standard output.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

IN_PROGRESS = 7
DTYPES = {"int32": 2, "float16": 6, "float32": 7}


class UniqueId(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("more", ctypes.c_int * 3),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class Client:
    """A rank with a device of its own, a stream and a communicator."""

    def __init__(self, nccl: str, cuda: str, rank: int, size: int, run: str) -> None:
        self.nccl, self.cuda = ctypes.CDLL(nccl), ctypes.CDLL(cuda)
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.rank, self.size = rank, size
        self._run, self._generation = run, 0
        self.check("cuInit", 0)
        context = ctypes.c_void_p()
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), rank % 4)
        self.check("cuCtxPushCurrent_v2", context)
        self.stream = self.new("cuStreamCreateWithPriority", 1, -1)

    def call(self, function: str, *args: Any) -> int:
        """Call a function of either library, with arrays by their addresses; return its code."""
        library = self.nccl if function.startswith("nccl") else self.cuda
        return getattr(library, function)(*map(as_argument, args))

    def check(self, function: str, *args: Any) -> None:
        code = self.call(function, *args)
        assert code == 0, f"{function} returned {code}"

    def new(self, function: str, *args: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.check(function, ctypes.byref(handle), *args)
        return handle

    def begin(self) -> tuple[int, ctypes.c_void_p]:
        """Start the next communicator; return the code and the handle."""
        self._generation += 1
        comm = ctypes.c_void_p()
        name = UniqueId(f"{self._run}-{self._generation}".encode())
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21800, 0)
        arguments = (self.size, name, self.rank, ctypes.byref(config))
        return self.call("ncclCommInitRankConfig", ctypes.byref(comm), *arguments), comm

    def connect(self) -> ctypes.c_void_p:
        code, comm = self.begin()
        assert self.settle(code, comm) == 0
        return comm

    def state(self, comm: ctypes.c_void_p) -> int:
        code = ctypes.c_int(-1)
        self.check("ncclCommGetAsyncError", comm, ctypes.byref(code))
        return code.value

    def settle(self, code: int, *comms: ctypes.c_void_p, limit: float = 5.0) -> int:
        """Return the code of a call on the communicators once it is known."""
        if code != IN_PROGRESS:
            return code
        self.until(lambda: all(self.state(comm) != IN_PROGRESS for comm in comms), limit)
        return max(map(self.state, comms))

    def launch(
        self,
        function: str,
        comm: ctypes.c_void_p,
        *args: Any,
        on: ctypes.c_void_p | None = None,
        limit: float = 5.0,
    ) -> int:
        """Call an operation, on the client's stream unless told, without waiting for its end."""
        return self.settle(self.call(function, *args, comm, on or self.stream), comm, limit=limit)

    def run(self, function: str, comm: ctypes.c_void_p, *args: Any) -> None:
        assert self.launch(function, comm, *args) == 0
        self.check("cuStreamSynchronize", self.stream)

    def mark(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        event = self.new("cuEventCreate", 2)
        self.check("cuEventRecord", event, stream)
        return event

    def pending(self, event: ctypes.c_void_p, limit: float) -> bool:
        """Return whether the event is not reached within ``limit`` seconds."""
        return not self.until(lambda: self.call("cuEventQuery", event) == 0, limit)

    def until(self, condition: Callable[[], bool], limit: float) -> bool:
        """Wait for the condition; return whether it came true."""
        end = time.monotonic() + limit
        while not (true := condition()) and time.monotonic() < end:
            time.sleep(1e-4)
        return true


def as_argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_size_t(value) if isinstance(value, int) else value


def run_clients(
    libraries: tuple[Path, Path],
    size: int,
    function: Callable[..., Any],
    *args: Any,
    dying: int | None = None,
    limit: float = 20.0,
) -> list[Any]:
    """Return ``function(client, *args)`` of `size` processes but the dying one."""
    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    task, run, end = cloudpickle.dumps((function, args)), secrets.token_hex(8), time.monotonic()
    command = [sys.executable, __file__, *map(str, libraries)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), run],
            env={**os.environ, "TAGI_DDP_STAND_IN_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:  # all of them before the first is waited for
            process.stdin.write(task)
            process.stdin.flush()
        results = []
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=max(end + limit - time.monotonic(), 0.1))
            if rank == dying:
                continue
            assert process.returncode == 0, f"rank {rank} failed"
            results.append(pickle.loads(output))
        return results
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def main() -> None:
    nccl, cuda, rank, size, run = sys.argv[1:]
    function, args = cloudpickle.load(sys.stdin.buffer)
    result = function(Client(nccl, cuda, int(rank), int(size), run), *args)
    sys.stdout.buffer.write(pickle.dumps(result))


if __name__ == "__main__":
    main()
