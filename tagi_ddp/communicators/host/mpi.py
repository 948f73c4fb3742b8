"""Ranks that an MPI launcher started, by mpi4py.

MPI must end the whole job when a rank fails: a process that ends with an error, or with a broken
communicator, would wait in MPI_Finalize for ranks that do not come. So it aborts the job instead.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tagi_ddp.communicators.buffers import equal_counts
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.checked import close_all, open_channel, opened
from tagi_ddp.communicators.control.handshake import Ready
from tagi_ddp.communicators.errors import BackendUnavailable, Timeout
from tagi_ddp.communicators.host.checked_host import CheckedHostCommunicator
from tagi_ddp.engine.loader import LIBMPI, STUB, holds_other_mpi, loaded_libraries
from tagi_ddp.environment import LaunchEnvironment, warn_if_launcher_disagrees

if loaded_libraries().get(LIBMPI) == STUB and not holds_other_mpi():
    raise ImportError("no MPI library was found when the engine was loaded")

import mpi4py

if "mpi4py.MPI" not in sys.modules:
    # `start` does it, as it may wait for other ranks. MPI ends with the process in any case.
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True

from mpi4py import MPI  # loads the library

_SPIN = 0.002  # seconds of polling before the pauses begin
_PAUSES = (0.0001, 0.001)  # seconds between two polls: at first, and when they take long
# Bytes that MPI sends over TCP without asking the receiver, whose leave would come behind what it
# sends itself; and how many such pieces each rank is sent at a time.
_PIECE, _FLYING = 60_000, 64
_SUMS = 10_000  # all_reduces that are told apart by their tags
_RECORD = 4096  # bytes of the padded record that the ranks exchange at first

_TYPES = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}

_REDUCE = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}

_FINALIZE = 2.0  # seconds that MPI may take to end after it has lost a rank

_broken = False
_outlives = False  # whether this process goes on in other groups when one is broken
_pending: set[Operation] = set()  # MPI may write to their buffers, even when nothing waits


class MpiEngine:
    """An MPI communicator, which it frees in the end."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        mpi.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py then raises
        self._mpi = mpi
        self._sums = 0  # begun so far

    def split(self, color: int | None, key: int) -> MpiEngine | None:
        """Return one of the ranks of a color, ordered by key; a call of all ranks."""
        made = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if made == MPI.COMM_NULL:
            return None
        assert isinstance(made, MPI.Intracomm)
        return MpiEngine(made)

    def part(self, name: str, ranks: list[int], call: Call) -> MpiEngine:
        """Return one of some ranks, all of which make it at once; MPI does not wait for long."""
        group = self._mpi.group.Incl(ranks)
        try:
            return MpiEngine(self._mpi.Create_group(group))
        finally:
            group.Free()

    def all_reduce(self, array: np.ndarray, op: ReduceOp, limit: float) -> Ready:
        self._sums = (self._sums + 1) % _SUMS
        return Sum(self._mpi, array, op, 1 + 2 * self._sums).ready

    def broadcast(self, array: np.ndarray, root: int, limit: float) -> Ready:
        return Request(self._mpi.Ibcast([array, _type(array)], root)).ready

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], limit: float
    ) -> Ready:
        kind = _type(array)
        return Request(self._mpi.Iallgatherv([array, kind], [out, counts, None, kind])).ready

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        limit: float,
    ) -> Ready:
        kind = _type(array)
        return Request(
            self._mpi.Ialltoallv([array, sent, None, kind], [out, received, None, kind])
        ).ready

    def send(self, array: np.ndarray, dst: int, limit: float) -> Ready:
        return Request(self._mpi.Isend([array, _type(array)], dst)).ready

    def recv(self, array: np.ndarray, src: int, limit: float) -> Ready:
        return Request(self._mpi.Irecv([array, _type(array)], src)).ready

    def close(self, clean: bool) -> None:
        global _broken
        # A script may have finalized MPI before its model goes.
        if clean and self._mpi != MPI.COMM_NULL and not MPI.Is_finalized():
            self._mpi.Free()
        _broken = _broken or (not clean and not _outlives)


class MpiCommunicator(CheckedHostCommunicator):
    """A rank whose data go over MPI communicators of its own."""

    backend = "mpi"

    def __init__(self, rank: int, size: int, timeout: float, channel: ControlChannel) -> None:
        """Make rank ``rank`` of ``size``; `open_engines` comes next."""
        super().__init__(rank, size, timeout, channel)
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._world: MpiEngine | None = None

    def open_engines(self, world: MpiEngine, call: Call) -> None:
        """Use ``world``, an engine of all ranks; ``call`` is what errors name."""
        self._world = world

        def make(name: str, ranks: list[int], call: Call) -> MpiEngine:
            return world if len(ranks) == self.size else world.part(name, ranks, call)

        self.open_ways(call, make)

    def _engine_split(
        self, call: Call, color: int | None, key: int, part: MpiCommunicator | None
    ) -> None:
        assert self._world is not None
        made = self._world.split(color, key)  # all ranks are here: MPI does not wait for long
        if part is not None and made is not None:
            part.open_engines(made, Call("init", "", call.left(), deadline=call.deadline))


class Operation:
    """What MPI does without blocking; it only advances while it is polled."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        _pending.add(self)

    def poll(self) -> bool:
        """Advance; tell whether it is done."""
        raise NotImplementedError

    def ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.poll():
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


class Request(Operation):
    """One request of MPI."""

    def __init__(self, request: MPI.Request) -> None:
        super().__init__()
        self._request = request

    def poll(self) -> bool:
        return self._request.Test()


class Sum(Operation):
    """An all_reduce: each rank reduces a slice, in the order of the ranks, for all.

    Slices travel in pieces: this rank reduces some while others are on their way. Messages have the
    number ``tag`` if they are to be reduced, and the next one if they have been. Open MPI's own sum
    that does not block uses one direction of the network at a time where few ranks take part.
    """

    def __init__(self, mpi: MPI.Intracomm, array: np.ndarray, op: ReduceOp, tag: int) -> None:
        super().__init__()
        self._mpi, self._op, self._tag, self._type = mpi, op, tag, _type(array)
        ends = np.cumsum(equal_counts(array.size, mpi.size))
        slices = [_pieces(part) for part in np.split(array, ends[:-1])]
        self._own = slices[mpi.rank]
        self._peers = [_Peer(i, slices[i]) for i in range(mpi.size) if i != mpi.rank]
        self._peers.sort(key=lambda peer: (peer.rank - mpi.rank) % mpi.size)  # each another first
        # By piece, what is to be reduced: a row for each rank.
        self._rows = [np.empty((mpi.size, piece.size), array.dtype) for piece in self._own]
        for peer in self._peers:
            peer.comes = [self._receive(rows[peer.rank], peer, tag) for rows in self._rows]
            self._exchange(peer)
        self._reduced = 0  # pieces
        self._told: list[MPI.Request] = []  # sent when they were

    def poll(self) -> bool:
        for peer in self._peers:
            self._exchange(peer)
        while self._reduced < len(self._own) and all(
            peer.comes[self._reduced].Test() for peer in self._peers
        ):
            piece, rows = self._own[self._reduced], self._rows[self._reduced]
            rows[self._mpi.rank] = piece
            _REDUCE[self._op].reduce(rows, axis=0, out=piece)
            self._told += [self._send(piece, peer, self._tag + 1) for peer in self._peers]
            self._reduced += 1
        return (
            self._reduced == len(self._own)
            and all(len(peer.results) == len(peer.pieces) for peer in self._peers)
            and all(peer.results[-1].Test() for peer in self._peers if peer.results)
            and MPI.Request.Testall([r for peer in self._peers for r in peer.results] + self._told)
        )

    def _exchange(self, peer: _Peer) -> None:
        """Send what the peer is to reduce; then its result may come in the same place."""
        sent, results = peer.sent, peer.results
        while len(results) < len(sent) and sent[len(results)].Test():
            results.append(self._receive(peer.pieces[len(results)], peer, self._tag + 1))
        while len(sent) < min(len(peer.pieces), len(results) + _FLYING):
            sent.append(self._send(peer.pieces[len(sent)], peer, self._tag))

    def _send(self, piece: np.ndarray, peer: _Peer, tag: int) -> MPI.Request:
        return self._mpi.Isend([piece, self._type], peer.rank, tag)

    def _receive(self, piece: np.ndarray, peer: _Peer, tag: int) -> MPI.Request:
        return self._mpi.Irecv([piece, self._type], peer.rank, tag)


@dataclass
class _Peer:
    """Another rank in a sum, and the pieces that it reduces."""

    rank: int
    pieces: list[np.ndarray]
    comes: list[MPI.Request] = field(default_factory=list)  # what this rank reduces
    sent: list[MPI.Request] = field(default_factory=list)
    results: list[MPI.Request] = field(default_factory=list)


def create(
    rank: int, world_size: int, environment: LaunchEnvironment, timeout: float
) -> MpiCommunicator:
    """Return this rank's communicator over a copy of MPI's world.

    Raises BackendUnavailable when MPI's world is another than the one asked for, Timeout when MPI
    itself does not start in time.
    """
    deadline = time.monotonic() + timeout
    start(rank, world_size, timeout)
    world = MPI.COMM_WORLD
    warn_if_launcher_disagrees(environment, world.rank, world.size)
    if (rank, world_size) != (world.rank, world.size):
        raise BackendUnavailable(
            f"this is rank {rank} of {world_size}, but MPI says rank {world.rank} of {world.size}: "
            "start the ranks with srun --mpi=pmix or the mpirun that belongs to mpi4py's MPI "
            f"({MPI.Get_library_version().splitlines()[0].strip()})"
        )
    return wrap(world, timeout, deadline)


def start(rank: int, size: int, timeout: float) -> None:
    """Start MPI unless it has been; in C it waits for all ranks, and nothing ends that."""
    if MPI.Is_initialized():
        return
    name = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    level: int = getattr(MPI, f"THREAD_{name.upper()}")
    if level < MPI.THREAD_MULTIPLE:  # the script's wish: this thread alone may use MPI
        MPI.Init_thread(level)
        return
    # ctypes, unlike mpi4py, lets other threads run meanwhile.
    library, provided = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    arguments = (None, None, ctypes.c_int(level), ctypes.byref(provided))
    thread = threading.Thread(target=library.MPI_Init_thread, args=arguments, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise Timeout(
            f"init on rank {rank} of {size} (mpi): MPI did not start within {timeout:g} s: a rank "
            "has not called init, nor imported mpi4py.MPI. Look at the ranks' output; raise "
            "timeout= if they are only slow. End this process: MPI cannot be started again."
        )
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does


def wrap(
    group: MPI.Intracomm, timeout: float = 300.0, deadline: float | None = None
) -> MpiCommunicator:
    """Return a communicator of the ranks of ``group`` over a copy of it.

    By ``deadline``, as time.monotonic() counts; None: within ``timeout`` seconds.
    """
    if group == MPI.COMM_NULL:
        raise ValueError("this rank is in no group: it got MPI.COMM_NULL")
    rank, size = group.rank, group.size
    end = time.monotonic() + timeout if deadline is None else deadline

    def complete(request: MPI.Request, what: str) -> None:
        if not Request(request).ready(end - time.monotonic()):
            where = f"init on rank {rank} of {size} (mpi)"
            raise Timeout(
                f"{where}: MPI could not {what} within {timeout:g} s. Make the same call on all "
                "ranks; look at their output."
            )

    def exchange(record: bytes) -> Sequence[bytes]:
        padded = np.frombuffer(record.ljust(_RECORD), np.uint8)
        records = np.empty((size, _RECORD), np.uint8)
        complete(copy.Iallgather(padded, records), "exchange addresses")
        return [row.tobytes().rstrip() for row in records]

    copy, request = group.Idup()
    complete(request, "copy the group")
    channel = open_channel(MpiCommunicator.backend, rank, size, timeout, end, exchange)
    comm = MpiCommunicator(rank, size, timeout, channel)
    return opened(comm, partial(comm.open_engines, MpiEngine(copy)), timeout, end)


def outlive_ranks() -> None:
    """Let a broken group be no reason to end all ranks; see `ulfm`."""
    global _outlives
    _outlives = True


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    step = _PIECE // array.itemsize
    return [array[begin : begin + step] for begin in range(0, array.size, step)]


def _type(array: np.ndarray) -> MPI.Datatype:
    return _TYPES[array.itemsize]


@atexit.register
def _end_job() -> None:
    """End all ranks if this one ends with an error, as MPI_Finalize would wait for the others."""
    close_all()
    failed = _broken or getattr(sys, "last_value", None) is not None
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    elif _outlives:
        # Open MPI 5.0 sometimes waits for the dead here, and nothing ends that.
        thread = threading.Thread(target=ctypes.CDLL(MPI.__file__).MPI_Finalize, daemon=True)
        thread.start()
        thread.join(_FINALIZE)
        if thread.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
