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
from functools import partial

import numpy as np

from tagi_ddp.communicators.buffers import cut
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT, ReduceOp
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.checked import close_all, open_channel, opened
from tagi_ddp.communicators.control.handshake import Handshake, Ready
from tagi_ddp.communicators.errors import BackendUnavailable, Timeout
from tagi_ddp.communicators.host.checked_host import CheckedHostCommunicator
from tagi_ddp.communicators.host.messages import is_large
from tagi_ddp.communicators.host.mpi_library import MPI, start
from tagi_ddp.communicators.host.mpi_requests import Exchange, Request, SmallSum, Sum, mpi_type
from tagi_ddp.environment import LaunchEnvironment, warn_if_launcher_disagrees

_TAGS = 1 << 24  # that tell calls apart well enough
_MOST = (1 << 31) - 1  # elements that MPI, whose counts are C's ints, takes at a time
# Tags: of users' messages, on their own communicator; and of collectives that exceed _MOST, below
# those of sums.
_MESSAGE = _LARGE = 0
_RECORD = 4096  # bytes of the padded record that the ranks exchange at first
_FINALIZE = 2.0  # seconds that MPI may take to end after it has lost a rank

_process = os.getpid()
_broken = False
_outlives = False  # whether this process goes on in other groups when one is broken


class MpiEngine:
    """An MPI communicator for collectives, and one for messages, which it frees in the end.

    A receive on ``messages`` cannot take what a collective sends. None: `send` and `recv` are not
    called.
    """

    chunks = 8

    def __init__(self, mpi: MPI.Intracomm, messages: MPI.Intracomm | None = None) -> None:
        self._mpi, self._messages = mpi, messages
        for each in self._communicators():
            each.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py then raises
        self._tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) // 2 - 1  # each of two numbers
        self.sums_meet = self.quick = self._tags >= _TAGS
        self._sums = 0  # begun so far
        self._lanes = 1  # ranks of a host that carry parts of a sum

    def _communicators(self) -> list[MPI.Intracomm]:
        return [self._mpi] if self._messages is None else [self._messages, self._mpi]

    def split(self, color: int | None, key: int) -> MpiEngine | None:
        """Return one of the ranks of a color, ordered by key; a call of all ranks."""
        made = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if made == MPI.COMM_NULL:
            return None
        assert isinstance(made, MPI.Intracomm)
        return MpiEngine(made, made.Dup())

    def part(self, name: str, ranks: list[int], call: Call) -> MpiEngine:
        """Return one of some ranks, all of which make it at once; MPI does not wait for long."""
        group = self._mpi.group.Incl(ranks)
        try:
            return MpiEngine(self._mpi.Create_group(group))
        finally:
            group.Free()

    def prepare_sums(self, handshake: Handshake, lanes: int) -> None:
        self._lanes = lanes  # and no more: MPI connects ranks when they first send

    def all_reduce(self, array: np.ndarray, op: ReduceOp, handshake: Handshake) -> Ready:
        self._sums += 1
        tag = 2 * handshake.tag(self._sums, self._tags)
        size = self._mpi.size
        if size == 2:
            return Exchange(self._mpi, array, op, tag, self._lanes).ready
        kind = Sum if is_large(size, array) else SmallSum
        return kind(self._mpi, array, op, tag).ready

    def broadcast(self, array: np.ndarray, root: int, handshake: Handshake) -> Ready:
        kind = mpi_type(array)
        return Request(*[self._mpi.Ibcast([part, kind], root) for part in _parts(array)]).ready

    def all_gather(
        self, array: np.ndarray, out: np.ndarray, counts: list[int], handshake: Handshake
    ) -> Ready:
        if out.size > _MOST:
            return Request(*self._exchange([array] * self._mpi.size, cut(out, counts))).ready
        kind = mpi_type(array)
        return Request(self._mpi.Iallgatherv([array, kind], [out, counts, None, kind])).ready

    def all_to_all(
        self,
        array: np.ndarray,
        out: np.ndarray,
        sent: list[int],
        received: list[int],
        handshake: Handshake,
    ) -> Ready:
        kind, share = mpi_type(array), _MOST // self._mpi.size
        if max(*sent, *received) <= share:
            return Request(
                self._mpi.Ialltoallv([array, sent, None, kind], [out, received, None, kind])
            ).ready
        # Both ranks of a pair know whether they exchange more than that; the others may not.
        goes, comes = cut(array, sent), cut(out, received)
        small = [part for part in comes if part.size <= share]
        packed = np.concatenate([array[:0], *(part for part in goes if part.size <= share)])
        landed = np.empty(sum(part.size for part in small), out.dtype)
        request = Request(
            self._mpi.Ialltoallv(
                [packed, [count * (count <= share) for count in sent], None, kind],
                [landed, [count * (count <= share) for count in received], None, kind],
            ),
            *self._exchange(
                [part[: part.size * (part.size > share)] for part in goes],
                [part[: part.size * (part.size > share)] for part in comes],
            ),
        )

        def ready(seconds: float) -> bool:
            if not request.ready(seconds):
                return False
            for part, came in zip(small, cut(landed, [part.size for part in small]), strict=True):
                part[...] = came
            return True

        return ready

    def _exchange(self, goes: list[np.ndarray], comes: list[np.ndarray]) -> list[MPI.Request]:
        """Begin to send each rank what goes to it, and to receive what comes, of any size."""
        kind = mpi_type(goes[0])
        requests = []
        for rank, (sent, received) in enumerate(zip(goes, comes, strict=True)):
            for part in _parts(received):
                requests.append(self._mpi.Irecv([part, kind], rank, _LARGE))
            for part in _parts(sent):
                requests.append(self._mpi.Isend([part, kind], rank, _LARGE))
        return requests

    def send(self, array: np.ndarray, dst: int, handshake: Handshake) -> Ready:
        assert self._messages is not None
        begin, kind = self._messages.Isend, mpi_type(array)
        return Request(*[begin([part, kind], dst, _MESSAGE) for part in _parts(array)]).ready

    def recv(self, array: np.ndarray, src: int, handshake: Handshake) -> Ready:
        assert self._messages is not None
        begin, kind = self._messages.Irecv, mpi_type(array)
        return Request(*[begin([part, kind], src, _MESSAGE) for part in _parts(array)]).ready

    def close(self, clean: bool) -> None:
        global _broken
        # A script may have finalized MPI before its model goes.
        if clean and self._mpi != MPI.COMM_NULL and not MPI.Is_finalized():
            for each in self._communicators():
                each.Free()
        _broken = _broken or (not clean and not _outlives)


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """Return a flat array in parts that MPI takes at a time; of no elements, none."""
    return [array[begin : begin + _MOST] for begin in range(0, array.size, _MOST)]


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


def place(timeout: float) -> LaunchEnvironment:
    """Return this process's place in MPI's world, of which no launcher tells."""
    start("init (mpi)", timeout)
    world = MPI.COMM_WORLD
    return LaunchEnvironment("mpi", world.rank, world.size, world.rank, 0)


def create(
    rank: int, world_size: int, environment: LaunchEnvironment, timeout: float
) -> MpiCommunicator:
    """Return this rank's communicator over a copy of MPI's world.

    Raises BackendUnavailable when MPI's world is another than the one asked for, Timeout when MPI
    itself does not start in time.
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
) -> MpiCommunicator:
    """Return a communicator of the ranks of ``group`` over copies of it.

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
    messages, request = group.Idup()
    complete(request, "copy the group")
    channel = open_channel(MpiCommunicator.backend, rank, size, timeout, end, exchange)
    comm = MpiCommunicator(rank, size, timeout, channel)
    return opened(comm, partial(comm.open_engines, MpiEngine(copy, messages)), timeout, end)


def outlive_ranks() -> None:
    """Let a broken group be no reason to end all ranks; see `ulfm`."""
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
    if os.getpid() != _process:  # a fork, which does not speak for its rank
        if error is not None:
            _flush()
            os._exit(1)  # MPI_Finalize would wait for threads that a fork does not have
        return
    failed = _broken or error is not None
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    if failed:
        _flush()
        MPI.COMM_WORLD.Abort(1)
    elif _outlives:
        # Open MPI 5.0 sometimes waits for the dead here, and nothing ends that.
        thread = threading.Thread(target=ctypes.CDLL(MPI.__file__).MPI_Finalize, daemon=True)
        thread.start()
        thread.join(_FINALIZE)
        if thread.is_alive():
            _flush()
            os._exit(0)
