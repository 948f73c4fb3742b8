"""Ranks with a CUDA device each, by NCCL: operations are enqueued in a stream.

Buffers are on the device. A blocking call returns when its operation is complete. With
``async_op=True`` it returns an `NcclWork`, whose ``order()`` makes the caller's stream wait instead
of the host. A thread polls operations for which nothing waits: if one fails or exceeds its limit,
the communicator is aborted on all ranks, and the next call raises the error.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from tagi_ddp._backend import Device, NcclRank
from tagi_ddp.communicators.communicator import Buffer, ReduceOp, Work
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.control.mesh import host_id
from tagi_ddp.communicators.control.notes import Series
from tagi_ddp.communicators.errors import BackendUnavailable, CommunicatorError
from tagi_ddp.communicators.nccl.buffers import DeviceElements, device_elements, import_torch
from tagi_ddp.communicators.nccl.libraries import NcclMissing, find_device, local_device, open_nccl
from tagi_ddp.communicators.nccl.work import NcclWork, StreamHandshake
from tagi_ddp.communicators.network.checked import (
    CheckedCommunicator,
    Connect,
    open_channel,
    opened,
)
from tagi_ddp.communicators.operations import Call, Helper, Ticket

# NCCL rounds to 16 bits after each addition, and has no integers of 16 bits.
_WIDE = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "uint16": "int32"}
T = TypeVar("T")

_TICK = 0.01  # seconds between two polls of operations for which nothing waits


class NcclCommunicator(CheckedCommunicator[DeviceElements, NcclWork]):
    """A rank of an NCCL communicator of its own."""

    backend = "nccl"

    def __init__(
        self, rank: int, size: int, timeout: float, channel: ControlChannel, device: Device
    ) -> None:
        """Make rank ``rank`` of ``size`` on ``device``; call `open` next."""
        super().__init__(rank, size, timeout, channel)
        self.device = f"cuda:{device.ordinal}"
        self._device = device
        self._nccl = open_nccl()
        # One for collectives, and one for messages of each pair in each direction.
        self._connections: dict[str, NcclRank] = {}
        self._pairs_connected = False
        self._beginning: StreamHandshake | None = None  # of a call from which NCCL has not returned
        self._enqueueing = threading.RLock()  # It keeps operations in the order of the calls.
        self._pending: deque[NcclWork] = deque()
        self._polling = threading.Lock()
        self._grouped: list[tuple[Call, NcclWork]] | None = None
        self._helper: Helper | None = None

    def open(self, call: Call) -> None:
        """Connect the ranks' devices; errors name ``call``."""
        handshake = self._handshake(call)
        connection = self._connect(handshake, "all", self.rank, self.size, minimal=True)
        with handshake.explaining():
            connection.make_blocking()
        handshake.wait_for(connection.ready)
        self._helper = Helper(self.look_after, _TICK)

    # Groups of operations, and objects of the host.

    @contextlib.contextmanager
    def group(self) -> Iterator[NcclWork]:
        """Run the collectives of the block as one operation, which starts at its end.

        In the block every call returns None; the context is the `Work` of all of them. They may run
        at the same time, so they must not share a buffer to which one of them writes; all buffers
        must be of one stream. `barrier`, `split` and messages raise a RuntimeError.
        """
        group = NcclWork()
        with self._enqueueing:
            if self._grouped is not None:
                raise RuntimeError("group() inside of group(): end the first block before")
            calls: list[tuple[Call, NcclWork]] = []
            self._grouped = calls
            try:
                yield group
            finally:
                self._grouped = None
            if calls:
                arguments = "; ".join(str(call) for call, _ in calls)
                call = Call("group", arguments, max(call.limit for call, _ in calls))
                group.gather([work for _, work in calls])
                self._start(call, group, awaited=False)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order, through the hosts."""

        own = json.loads(json.dumps(value))

        def gather() -> list[Any]:
            handshake = self._handshake(call)
            values = handshake.gather(own)
            handshake.leave()
            return [values[r] for r in range(self.size)]

        call = self._call("all_gather_object", "", None)
        return self._submit(call, gather, False).result()

    # Operations, which `_start` enqueues in their stream.

    def _elements(self, buffer: Buffer, name: str, *, writable: bool = False) -> DeviceElements:
        return device_elements(buffer, name, self._device, writable=writable)

    def _all_reduce(
        self, call: Call, source: DeviceElements, target: DeviceElements, op: ReduceOp
    ) -> NcclWork:
        narrow = target
        if _must_widen(source, op):
            source = target = self._widened(source)
        return NcclWork(
            source.stream,
            [lambda: self._all_ranks.all_reduce(source.memory, target.memory, op)],
            [source, target, narrow],
            _narrowing(target, narrow),
        )

    def _broadcast(self, call: Call, data: DeviceElements, root: int) -> NcclWork:
        return NcclWork(data.stream, [lambda: self._all_ranks.broadcast(data.memory, root)], [data])

    def _all_gather(
        self, call: Call, source: DeviceElements, target: DeviceElements, counts: list[int]
    ) -> NcclWork:
        return NcclWork(
            source.stream,
            [lambda: self._all_ranks.all_gather(source.memory, target.memory, counts)],
            [source, target],
        )

    def _reduce_scatter(
        self,
        call: Call,
        source: DeviceElements,
        target: DeviceElements,
        counts: list[int],
        op: ReduceOp,
    ) -> NcclWork:
        narrow = target
        if _must_widen(source, op):
            source, target = self._widened(source), self._widened(target)
        return NcclWork(
            source.stream,
            [lambda: self._all_ranks.reduce_scatter(source.memory, target.memory, counts, op)],
            [source, target, narrow],
            _narrowing(target, narrow),
        )

    def _all_to_all(
        self,
        call: Call,
        source: DeviceElements,
        target: DeviceElements,
        sent: list[int],
        received: list[int],
    ) -> NcclWork:
        def fits(a: int, b: int) -> str:
            return f"sends {a} elements and expects {b}"

        others = [rank for rank in range(self.size) if rank != self.rank]
        return NcclWork(
            source.stream,
            [lambda: self._all_ranks.all_to_all(source.memory, target.memory, sent, received)],
            [source, target],
            messages={r: fits(sent[r], received[r]) for r in others},
            expected={r: fits(received[r], sent[r]) for r in others},
        )

    def _barrier(self, call: Call) -> None:
        for work in list(self._pending):
            work.await_end()
        super()._barrier(call)

    def _transfer(self, handshake: Handshake, data: DeviceElements, peer: int) -> None:
        if handshake.call.name == "send":
            pair = self._connect(handshake, f"{self.rank} to {peer}", 0, 2)
            enqueue = partial(pair.send, data.memory, 1)
        else:
            pair = self._connect(handshake, f"{peer} to {self.rank}", 1, 2)
            enqueue = partial(pair.recv, data.memory, 0)
        with handshake.explaining():
            operation = pair.group(data.stream, enqueue)
        handshake.wait_for(operation.enqueued)
        handshake.wait_for(operation.complete)

    def _part(self, call: Call, ranks: list[int], token: str, connect: Connect) -> NcclCommunicator:
        rank = ranks.index(self.rank)
        part = NcclCommunicator(rank, len(ranks), self.timeout, connect(), self._device)
        return opened(part, part.open, call)

    def _widened(self, narrow: DeviceElements) -> DeviceElements:
        """Return a copy in the dtype of its sums."""
        torch = import_torch(f"a reduction of {narrow.dtype}")
        for work in list(self._pending):  # Their stream does not order the copy.
            work.order_before(narrow.stream)
        wide = narrow.tensor().to(getattr(torch, _WIDE[narrow.dtype]))
        return DeviceElements(
            _WIDE[narrow.dtype], narrow.count, wide.data_ptr(), wide, narrow.stream
        )

    # Order and the end.

    @property
    def _all_ranks(self) -> NcclRank:
        return self._connections["all"]

    def _connect(
        self, handshake: Handshake, name: str, rank: int, size: int, minimal: bool = False
    ) -> NcclRank:
        """Return the connection ``name``, in which this is rank ``rank`` of ``size``."""
        if name in self._connections:
            return self._connections[name]
        key, channel, values = f"nccl {name}", self._channel, self._channel.notes.values
        with handshake.explaining():
            if rank == 0:
                with channel.sending() as notes:
                    notes.keep(key, self._nccl.unique_id())
        handshake.wait_for(
            lambda seconds: channel.until(lambda: key in values, time.monotonic() + seconds)
        )
        with handshake.explaining():
            made = NcclRank.connect(self._nccl, self._device, rank, size, values[key], minimal)
        self._connections[name] = made
        handshake.wait_for(made.ready)
        return made

    def _submit(self, call: Call, operation: Callable[[], T], async_op: bool) -> Ticket[T]:
        with self._enqueueing:  # While one thread has a group, the others wait.
            if self._grouped is not None:
                raise RuntimeError(f"{call.name}() inside of group(): end the block before")
        return super()._submit(call, operation, async_op)

    def _collective(
        self, call: Call, operation: Callable[[], NcclWork], async_op: bool
    ) -> Work | None:
        if not async_op:
            self._check_outside(call.name)
        with self._enqueueing:
            work = operation()
            if self._grouped is not None:
                self._check_open(call.name)
                self._grouped.append((call, work))
                return None
            self._start(call, work, awaited=not async_op)
        if async_op:
            return work
        work.wait()
        return None

    def _start(self, call: Call, work: NcclWork, awaited: bool) -> None:
        """Enqueue an operation in its stream; the ranks' calls are compared later."""
        with self._lock:
            self._number(call)
        self._check_failure(call)
        call.deadline = time.monotonic() + call.limit
        where = self._where(call.title)
        handshake = StreamHandshake(self._channel, where, call, lambda: self._failure)
        try:
            handshake.enter(work.messages, work.expected, awaited)
            if work.messages and not self._pairs_connected:
                handshake.await_all()  # NCCL connects each pair, and waits for both.
            self._beginning = handshake

            def enqueue() -> None:
                for each in work.enqueue:
                    each()

            with handshake.explaining():
                operation = self._all_ranks.group(work.stream, enqueue)
            self._pairs_connected |= bool(work.messages)
        except BaseException as error:
            self._break(call, error)
            raise
        finally:
            self._beginning = None
        call.deadline = math.inf  # Its limit counts once it begins.
        work.begin(operation, handshake, self._inside, self._fail)
        self._pending.append(work)
        work.finish()

    def look_after(self) -> None:
        """Drop complete operations, and report the last one to ranks that wait for it.

        The next call raises the error of an operation that has failed.
        """
        completed = -1
        with self._polling, contextlib.suppress(CommunicatorError):
            if (beginning := self._beginning) is not None:
                try:
                    beginning.poll()
                except CommunicatorError as error:
                    self._fail(error)  # This ends NCCL's call, too.
                    raise
            while self._pending and self._pending[0].poll():
                completed = self._pending.popleft().call.number
        with self._channel.sending() as notes:
            notes.leave(Series.COLLECTIVE, completed)

    def _announce(self, error: CommunicatorError, reason: str) -> None:
        super()._announce(error, reason)
        self._library_close(clean=False)

    def _leave(self) -> None:
        with contextlib.suppress(CommunicatorError):
            for work in list(self._pending):
                work.wait()
        self.look_after()
        # The helper must not use a closed channel, nor be in NCCL when the interpreter ends.
        if self._helper is not None:
            self._helper.close(self.timeout)
        super()._leave()

    def _library_close(self, clean: bool) -> None:
        # All ranks have completed all operations, so an abort harms none.
        for connection in list(self._connections.values()):
            with contextlib.suppress(RuntimeError):
                connection.abort()


def _must_widen(source: DeviceElements, op: ReduceOp) -> bool:
    return source.dtype in _WIDE and ("int" in source.dtype or op in ("sum", "mean"))


def _narrowing(wide: DeviceElements, narrow: DeviceElements) -> list[Callable[[], object]]:
    """Return the step that copies a wide result to the caller's buffer, if that is another."""
    return [] if wide is narrow else [lambda: narrow.tensor().copy_(wide.tensor())]


def create(
    rank: int,
    world_size: int,
    device_or_rank: tuple[int | None, int],
    timeout: float,
    exchange: Callable[[list[Any]], Sequence[list[Any]]],
) -> NcclCommunicator:
    """Return this rank's communicator, on the device of a number or, if that is None, local rank.

    ``exchange`` returns every rank's value, sent as JSON. Raises BackendUnavailable, on all ranks,
    if one cannot take part, NcclMissing if only NCCL is missing.
    """
    found: Device | None = None
    problem: BackendUnavailable | None = None
    try:
        number, local_rank = device_or_rank
        found = find_device(local_device(local_rank) if number is None else number)
        open_nccl()
    except BackendUnavailable as error:
        problem = error

    def exchange_records(record: bytes) -> Sequence[bytes]:
        own = None if problem is None else [isinstance(problem, NcclMissing), str(problem)]
        answers = exchange([own, record.decode()])
        problems = {rank: each for rank, (each, _) in enumerate(answers) if each is not None}
        if problems:
            only_nccl = all(lacks_nccl for lacks_nccl, _ in problems.values())
            kind = NcclMissing if only_nccl else BackendUnavailable
            texts = [f"rank {rank}: {text}" for rank, (_, text) in problems.items()]
            raise kind("; ".join(texts), list(problems))
        return [record.encode() for _, record in answers]

    call = Call("init", "", timeout, deadline=time.monotonic() + timeout)
    hosts = [host.decode() for host in exchange_records(host_id().encode())]
    where = f"init on rank {rank} of {world_size} (nccl)"
    channel = open_channel(where, rank, hosts, call, exchange_records)
    assert found is not None, "else exchange_records has raised"
    comm = NcclCommunicator(rank, world_size, timeout, channel, found)
    return opened(comm, comm.open, call)
