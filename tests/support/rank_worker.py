"""The other side of `rank_pool`: a process that runs the functions that the pool sends it.

``python rank_worker.py <address>`` is one rank under mpirun. ``python rank_worker.py --nursery
<address>`` imports what is slow to import and then forks a rank at every request.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import cloudpickle

from tagi_ddp.communicators import Communicator, init
from tagi_ddp.engine.loader import load_engine

PR_SET_PDEATHSIG = 1


class Uncaught(Exception):
    """Raised by a task to end its process as an error that nobody catches does."""


def connect(address: str) -> Connection:
    return Client("\0" + address, authkey=bytes.fromhex(os.environ["RANK_POOL_KEY"]))


class Worker:
    """One rank: keeps the communicator of the last task for the next one of the same key."""

    def __init__(self, connection: Connection, make: Callable[..., Any]) -> None:
        self.connection = connection
        self.make = make
        self.key = ""
        self.comm: Communicator | None = None

    def serve(self) -> None:
        while True:
            try:
                request = self.connection.recv()
            except (EOFError, ConnectionError):
                self.leave()
                return
            self.connection.send_bytes(self.answer(*request))

    def answer(self, key: str, settings: dict[str, Any], task: bytes) -> bytes:
        try:
            if key != self.key:
                self.leave()
                self.comm = self.make(**settings)
                self.key = key
            function, args = cloudpickle.loads(task)
            return cloudpickle.dumps((True, function(self.comm, *args)))
        except Uncaught:
            raise
        except BaseException as error:
            text = traceback.format_exc()
            if self.comm is not None:
                try:
                    self.comm.abort(f"{type(error).__name__}: {error}")
                except Exception as second:
                    text += f"and abort() raised {second!r}\n"
            return cloudpickle.dumps((False, text))

    def leave(self) -> None:
        if self.comm is not None:
            self.comm.close()
            self.comm = None


def start_worker(address: str, rank: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)
    if "RANK_POOL_ON_DEVICE" in os.environ:
        from support.on_device import init as make
    else:
        make = init
    if rank_of_mpi() is not None:
        import mpi4py.MPI  # noqa: F401  (its start takes longer than some limits of the tasks)
    if hosts := os.environ.get("RANK_POOL_HOSTS"):
        emulate_host(hosts[rank])
    connection = connect(address)
    connection.send((rank, os.getpid()))
    Worker(connection, make).serve()


def rank_of_mpi() -> int | None:
    """Return the number that mpirun has given this process."""
    found = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
    return None if found is None else int(found)


def emulate_host(name: str) -> None:
    """Give this process the id of another host. Its connections stay those of this host."""
    from tagi_ddp.communicators import topology

    topology.host_id = lambda: name


def nursery(address: str) -> None:
    # What ranks would import one by one: torch, too, with what its optimizers import at first, the
    # engine, and pytest for asserts in tasks.
    for name in ("communicators.network.rendezvous", "communicators.shm", "sequential"):
        importlib.import_module(f"tagi_ddp.{name}")
    for name in ("torch._dynamo", "_pytest.assertion.rewrite"):
        importlib.import_module(name)
    load_engine()

    gc.freeze()  # so that the children do not copy what nobody collects
    connection = connect(address)
    connection.send((-1, os.getpid()))
    while True:
        if not connection.poll(0.05):
            reap()
            continue
        try:
            address_of_pool, rank, environment = connection.recv()
        except (EOFError, ConnectionError):
            return
        if os.fork() == 0:
            connection.close()
            os.environ.update(environment)
            start_worker(address_of_pool, rank)
            # Taking apart all that was imported would copy its memory, a second for each process.
            atexit._run_exitfuncs()
            os._exit(0)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    # One Uncaught, however it is imported.
    sys.modules["support.rank_worker"] = sys.modules["__main__"]
    if sys.argv[1] == "--nursery":
        nursery(sys.argv[2])
    else:
        number = rank_of_mpi()
        assert number is not None, "mpirun starts it"
        start_worker(sys.argv[1], number)
