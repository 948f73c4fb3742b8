"""Ranks that an MPI launcher started, by mpi4py.

A process that ends with an error, or with a broken communicator, aborts the whole job. Else it
would wait in MPI_Finalize for ranks that never call it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import product, starmap
from typing import Any

import numpy as np

from tagi_ddp.communicators.buffers import cut
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT, Communicator, ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Differ, Handshake
from tagi_ddp.communicators.errors import BackendUnavailable, Timeout
from tagi_ddp.communicators.network.checked import close_all
from tagi_ddp.communicators.network.communicator import NetworkCommunicator
from tagi_ddp.communicators.network.connect import connect
from tagi_ddp.communicators.operations import Call, OperationQueue, Ready, in_time
from tagi_ddp.engine.loader import LIBMPI, STUB, holds_other_mpi, loaded_libraries
from tagi_ddp.environment import LaunchEnvironment, warn_if_launcher_disagrees

if loaded_libraries().get(LIBMPI) == STUB and not holds_other_mpi():
    raise ImportError("no MPI library was found when the engine was loaded")

import mpi4py

if "mpi4py.MPI" not in sys.modules:
    # `start` initializes MPI, which may wait for other ranks. MPI ends with the process.
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True

from mpi4py import MPI  # This loads the library.

__all__ = ["MPI", "create", "outlive_ranks", "start", "world_environment", "wrap"]

_MOST = (1 << 31) - 1  # elements of one call: MPI's counts are C's ints
# Bytes beyond which a thread waits in MPI's blocking call. Sites tune those, and Open MPI's other
# calls take up to five times as long. Polling is faster for fewer bytes.
_LARGE = 1 << 16
_COPIES = 3  # of a group: data of collectives, small gathers and messages must not match
# Bytes of each rank that a comparison of calls can gather, and the most ranks for which it does.
_FEW, _SOME = 4096, 8
_SPIN = 0.005  # seconds of polling before the pauses begin
_POLLS = 8
_PAUSES = (0.0001, 0.001)  # seconds between two polls, the shortest and the longest
_MESSAGE = 0  # the tag of messages
_FINALIZE = 2.0  # seconds that MPI may take to end after it has lost a rank
_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}

_process = os.getpid()
_broken = False
_outlives = False  # True if this process continues in other groups when one is broken
_pending: set[_Poll] = set()  # MPI may write to their buffers, even if nothing waits.
_made: weakref.WeakSet[Communicator] = weakref.WeakSet()


class MpiLibrary:
    """MPI communicators of the same ranks: for collectives, small gathers, and messages."""

    reducible = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))

    def __init__(self, *communicators: MPI.Intracomm) -> None:
        """Use three communicators, which `close` frees."""
        self._communicators = communicators
        self._collectives, self._few, self._messages = communicators
        for each in communicators:
            each.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises the errors.
        self.few = _FEW if self._few.size <= _SOME else 0
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._thread = OperationQueue("tagi_ddp MPI")

    def compare(
        self, handshake: Handshake, data: np.ndarray | None = None
    ) -> tuple[Ready, np.ndarray]:
        if data is not None:
            return self._gather_few(handshake.digest, data)
        own = np.frombuffer(handshake.digest, np.uint64)
        least = np.array([own[0], ~own[0]])
        ready = self._begin("allreduce", 0, [(MPI.IN_PLACE, least, MPI.MIN)])
        return _compared(ready, lambda: least[0] == ~least[1]), np.empty((0, 0), np.uint8)

    def _gather_few(self, digest: bytes, data: np.ndarray) -> tuple[Ready, np.ndarray]:
        own = np.zeros(len(digest) + _FEW, np.uint8)
        own[: len(digest)] = np.frombuffer(digest, np.uint8)
        own[len(digest) : len(digest) + data.size] = data
        rows = np.empty((self._few.size, own.size), np.uint8)
        digests, data = np.split(rows, [len(digest)], axis=1)
        ready = _Poll([self._few.Iallgather(own, rows)]).ready
        return _compared(ready, lambda: all(each.tobytes() == digest for each in digests)), data

    def all_reduce(self, array: np.ndarray, op: ReduceOp, limit: float) -> Ready:
        calls = product([MPI.IN_PLACE], _parts(array), [_OPS[op]])
        return self._begin("allreduce", array.nbytes, calls)

    def broadcast(self, array: np.ndarray, root: int, limit: float) -> Ready:
        calls = product(_parts(_unsigned(array)), [root])
        return self._begin("bcast", array.nbytes, calls)

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Ready:
        source, target = _unsigned(array), _unsigned(out)
        if out.size <= _MOST:
            return self._begin("allgatherv", out.nbytes, [(source, [target, counts])])
        wholes = cut(target, counts)
        wholes[self._collectives.rank][...] = source
        calls = [(part, root) for root, whole in enumerate(wholes) for part in _parts(whole)]
        return self._begin("bcast", out.nbytes, calls)

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        most: int,
        limit: float,
    ) -> Ready:
        source, target = _unsigned(array), _unsigned(out)
        if most * len(sent) <= _MOST:
            size = most * len(sent) * array.itemsize
            return self._begin("alltoallv", size, [([source, sent], [target, received])])
        group, requests = self._collectives, []
        for rank, part in enumerate(cut(target, received)):
            requests += _messages(group.Irecv, part, rank)
        for rank, part in enumerate(cut(source, sent)):
            requests += _messages(group.Isend, part, rank)
        return _Poll(requests).ready

    def send(self, array: np.ndarray, dst: int, limit: float) -> Ready:
        return _Poll(_messages(self._messages.Isend, _unsigned(array), dst)).ready

    def recv(self, array: np.ndarray, src: int, limit: float) -> Ready:
        return _Poll(_messages(self._messages.Irecv, _unsigned(array), src)).ready

    def part(self, ranks: list[int], channel: ControlChannel, call: Call) -> MpiLibrary:
        group = self._collectives.group.Incl(ranks)
        try:  # All of them call this now, so MPI does not wait long.
            return MpiLibrary(
                *(self._collectives.Create_group(group, tag) for tag in range(_COPIES))
            )
        finally:
            group.Free()

    def _begin(self, name: str, size: int, calls: Iterable[tuple[Any, ...]]) -> Ready:
        """Begin ``calls`` of one of MPI's collectives, by their arguments.

        They move ``size`` bytes, the same on all ranks.
        """
        if size <= _LARGE or not self.concurrent:
            begin = getattr(self._collectives, f"I{name}")
            return _Poll(list(starmap(begin, calls))).ready
        call = getattr(self._collectives, name.capitalize())
        return self._thread.begin(lambda: list(starmap(call, calls)))

    def close(self, clean: bool) -> None:
        global _broken
        self._thread.close(None if clean else 0.0)
        # A script may have finalized MPI before its model closes.
        if clean and not MPI.Is_finalized():
            for each in self._communicators:
                each.Free()
        _broken = _broken or (not clean and not _outlives)


class _Poll:
    """Concurrent requests of MPI, which only advance while they are polled."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests
        self._begun = time.monotonic()
        _pending.add(self)

    def ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._poll():
            now = time.monotonic()
            if now > end:
                return False
            age = now - self._begun
            if age < _SPIN:
                os.sched_yield()
            else:
                time.sleep(min(max(age / 100, _PAUSES[0]), _PAUSES[1]))
        _pending.discard(self)
        return True

    def _poll(self) -> bool:
        for _ in range(_POLLS):
            while self._requests and self._requests[-1].Test():
                self._requests.pop()
            if not self._requests:
                return True
        return False


def _compared(ready: Ready, same: Callable[[], bool]) -> Ready:
    """Return a function that waits for ``ready`` and then raises Differ unless ``same()``."""

    def compared(seconds: float) -> bool:
        if not ready(seconds):
            return False
        if not same():
            raise Differ
        return True

    return compared


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """Split a flat array into parts for one call of MPI each."""
    if array.size <= _MOST:
        return [array]
    return [array[begin : begin + _MOST] for begin in range(0, array.size, _MOST)]


def _messages(
    begin: Callable[..., MPI.Request], array: np.ndarray, other: int
) -> list[MPI.Request]:
    """Begin to send an array to another rank, or to receive it from there."""
    return [begin(part, other, _MESSAGE) for part in _parts(array)]


def _unsigned(array: np.ndarray) -> np.ndarray:
    """Return the same memory as unsigned integers, which every MPI supports."""
    return array.view(f"uint{8 * array.itemsize}")


def start(where: str, timeout: float) -> None:
    """Start MPI unless it has been started; this waits for all ranks.

    ``timeout`` limits it, unless only this thread may use MPI. ``where`` begins an error's text.
    """
    if MPI.Is_initialized():
        return
    name = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    level: int = getattr(MPI, f"THREAD_{name.upper()}")
    if level < MPI.THREAD_MULTIPLE:  # The script allows MPI on this thread only.
        MPI.Init_thread(level)
        return
    # ctypes, unlike mpi4py, lets other threads run meanwhile.
    library, provided = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    arguments = (None, None, ctypes.c_int(level), ctypes.byref(provided))
    late = Timeout(
        f"{where}: MPI did not start within {timeout:g} s: a rank has not called init, nor "
        "imported mpi4py.MPI. Look at the ranks' output; raise timeout= if they are only slow. "
        "End this process: MPI cannot be started again."
    )
    in_time(lambda: library.MPI_Init_thread(*arguments), timeout, late)
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py does so, too.


def world_environment(timeout: float) -> LaunchEnvironment:
    """Return this process's launch environment in MPI's world, if no launcher sets one."""
    start("init (mpi)", timeout)
    world = MPI.COMM_WORLD
    return LaunchEnvironment("mpi", world.rank, world.size, world.rank, 0)


def create(
    rank: int, world_size: int, environment: LaunchEnvironment, timeout: float
) -> Communicator:
    """Return this rank's communicator over copies of MPI's world.

    Raises BackendUnavailable if MPI's world is not the requested one, Timeout if MPI itself does
    not start in time.
    """
    deadline = time.monotonic() + timeout
    start(f"init on rank {rank} of {world_size} (mpi)", timeout)
    world = MPI.COMM_WORLD
    if environment.launcher != "none":
        warn_if_launcher_disagrees(environment, world.rank, world.size)
    if (rank, world_size) != (world.rank, world.size):
        raise BackendUnavailable(
            f"this is rank {rank} of {world_size}, but MPI says rank {world.rank} of {world.size}: "
            "start the ranks with srun --mpi=pmix or the mpirun that belongs to mpi4py's MPI "
            f"({MPI.Get_library_version().splitlines()[0].strip()})"
        )
    return wrap(world, timeout, deadline)


def wrap(
    group: MPI.Intracomm, timeout: float = DEFAULT_TIMEOUT, deadline: float | None = None
) -> Communicator:
    """Return a communicator of the ranks of ``group`` over copies of it.

    The limit is ``deadline``, a time of time.monotonic(); None: ``timeout`` seconds from now.
    """
    if group == MPI.COMM_NULL:
        raise ValueError("this rank is in no group: it got MPI.COMM_NULL")
    rank, size = group.rank, group.size
    end = time.monotonic() + timeout if deadline is None else deadline

    def complete(request: MPI.Request, what: str) -> None:
        if not _Poll([request]).ready(end - time.monotonic()):
            where = f"init on rank {rank} of {size} (mpi)"
            raise Timeout(
                f"{where}: MPI could not {what} within {timeout:g} s. Make the same call on all "
                "ranks; look at their output."
            )

    def exchange(record: bytes) -> Sequence[bytes]:
        length = np.array([len(record)])
        complete(copies[0].Iallreduce(MPI.IN_PLACE, length, MPI.MAX), "exchange addresses")
        padded = np.frombuffer(record.ljust(length[0]), np.uint8)
        records = np.empty((size, length[0]), np.uint8)
        complete(copies[0].Iallgather(padded, records), "exchange addresses")
        return [row.tobytes().rstrip() for row in records]

    copies = []
    for _ in range(_COPIES):
        copy, request = group.Idup()
        complete(request, "copy the group")
        copies.append(copy)
    call = Call("init", "", timeout, deadline=end)
    library = MpiLibrary(*copies)
    communicator = connect("mpi", rank, size, call, exchange, lambda *_: library, levels=False)
    if not isinstance(communicator, NetworkCommunicator):
        library.close(clean=True)  # The ranks use their host's memory instead.
    _made.add(communicator)
    return communicator


def outlive_ranks() -> None:
    """Do not end all ranks when a group breaks; see `ulfm`."""
    global _outlives
    _outlives = True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


@atexit.register
def _end_job() -> None:
    """End all ranks if this one ends with an error, as MPI_Finalize would wait for the others."""
    close_all()
    error = getattr(sys, "last_value", None)
    if os.getpid() != _process:  # A fork must not end its parent's job.
        if error is not None:
            _flush()
            os._exit(1)  # MPI_Finalize would wait for threads that a fork lacks.
        return
    broken = _broken or (not _outlives and any(getattr(each, "failed", False) for each in _made))
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    if error is not None or broken:
        _flush()
        MPI.COMM_WORLD.Abort(1)
    elif _outlives:
        # Open MPI 5.0 sometimes waits for dead ranks here, without end.
        thread = threading.Thread(target=ctypes.CDLL(MPI.__file__).MPI_Finalize, daemon=True)
        thread.start()
        thread.join(_FINALIZE)
        if thread.is_alive():
            _flush()
            os._exit(0)
