"""What the communicators written in Python share: arguments, order, numbers, the end."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from tagi_ddp import checks
from tagi_ddp.communicators import buffers
from tagi_ddp.communicators.buffers import Elements
from tagi_ddp.communicators.communicator import Buffer, ReduceOp, Work
from tagi_ddp.communicators.errors import (
    CommunicatorError,
    PeerLost,
    Timeout,
    timeout_text,
)
from tagi_ddp.communicators.operation_queue import Lane

C = TypeVar("C", bound="BaseCommunicator")
E = TypeVar("E", bound=Elements)


@dataclass
class Call:
    """One operation of one rank.

    Ranks whose ``name`` or ``arguments`` of the same operation differ made calls that do not fit.
    ``deadline`` is on the monotonic clock, counted from when the operation's turn came.
    ``waits_for`` returns the ranks that it waits for now.
    """

    name: str
    arguments: str
    limit: float
    peer: str = ""  # "to rank 1" for a message
    number: int = 0
    deadline: float = 0.0
    waits_for: Callable[[], list[int]] = list

    @property
    def title(self) -> str:
        """For example "all_reduce #17" or "send #3 to rank 1"."""
        if self.number == 0:
            return self.name
        return f"{self.name} #{self.number} {self.peer}".rstrip()

    def left(self) -> float:
        """Return the seconds before the deadline, at least a few."""
        return max(0.01, self.deadline - time.monotonic())


class BaseCommunicator(ABC, Generic[E]):
    """Checks arguments, numbers the calls and runs them in order; subclasses move the data.

    Messages out have a lane of their own, so that ranks which send to each other with
    ``async_op=True`` and then receive do not wait for one another.
    """

    backend: str
    device = "cpu"
    concurrent = True
    """Whether asynchronous operations may run on another thread; else they run within the call."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        """Make rank ``rank`` of ``size``; ``timeout`` in seconds limits every wait."""
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._lock = threading.RLock()
        self._numbers: Counter[str] = Counter()
        self._main_lane = Lane(f"tagi_ddp {self.backend} operations")
        self._send_lane = Lane(f"tagi_ddp {self.backend} messages")
        self._failure: CommunicatorError | None = None
        self._closed = False

    # Operations, as described in `Communicator`.

    def all_reduce(
        self,
        buffer: Buffer,
        op: ReduceOp = "sum",
        *,
        out: Buffer | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Reduce ``buffer`` over all ranks into ``out``, in place when ``out`` is None."""
        source = self._elements(buffer, "buffer", writable=out is None)
        target = source if out is None else self._elements(out, "out", writable=True)
        buffers.check_op(op, source.dtype)
        buffers.check_result(source, target, source.count, in_place=True)
        call = self._call("all_reduce", f"{source}, op={op}", timeout)
        return self._run(call, lambda: self._all_reduce(call, source, target, op), async_op)

    def broadcast(
        self,
        buffer: Buffer,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Copy ``buffer`` of rank ``root`` into ``buffer`` of every other rank."""
        root = checks.rank("root", root, self.size)
        data = self._elements(buffer, "buffer", writable=root != self.rank)
        call = self._call("broadcast", f"{data}, root={root}", timeout)
        return self._run(call, lambda: self._broadcast(call, data, root), async_op)

    def all_gather(
        self,
        buffer: Buffer,
        out: Buffer,
        counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Concatenate every rank's ``buffer``, in rank order, into ``out`` of every rank."""
        source = self._elements(buffer, "buffer")
        target = self._elements(out, "out", writable=True)
        if counts is None:
            sizes = [source.count] * self.size
        else:
            sizes = buffers.check_counts(counts, "counts", self.size, target, "out")
        buffers.check_count(source, "buffer", sizes[self.rank])
        buffers.check_result(source, target, sum(sizes))
        call = self._call("all_gather", f"{source.dtype}{sizes}", timeout)
        return self._run(call, lambda: self._all_gather(call, source, target, sizes), async_op)

    def reduce_scatter(
        self,
        buffer: Buffer,
        out: Buffer,
        counts: Sequence[int] | None = None,
        op: ReduceOp = "sum",
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Reduce ``buffer`` over all ranks and leave rank r its slice of the result in ``out``."""
        source = self._elements(buffer, "buffer")
        target = self._elements(out, "out", writable=True)
        buffers.check_op(op, source.dtype)
        sizes = buffers.check_counts(counts, "counts", self.size, source, "buffer")
        buffers.check_result(source, target, sizes[self.rank])
        call = self._call("reduce_scatter", f"{source.dtype}{sizes}, op={op}", timeout)
        return self._run(
            call, lambda: self._reduce_scatter(call, source, target, sizes, op), async_op
        )

    def all_to_all(
        self,
        buffer: Buffer,
        out: Buffer,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Send ``send_counts[r]`` elements to each r and receive ``recv_counts[r]`` from it."""
        source = self._elements(buffer, "buffer")
        target = self._elements(out, "out", writable=True)
        sent = buffers.check_counts(send_counts, "send_counts", self.size, source, "buffer")
        received = buffers.check_counts(recv_counts, "recv_counts", self.size, target, "out")
        buffers.check_result(source, target, target.count)
        if sent[self.rank] != received[self.rank]:
            raise ValueError(
                f"send_counts[{self.rank}] is {sent[self.rank]} and recv_counts[{self.rank}] is "
                f"{received[self.rank]}, but what this rank sends to itself is what it receives"
            )
        call = self._call("all_to_all", source.dtype, timeout)
        return self._run(
            call, lambda: self._all_to_all(call, source, target, sent, received), async_op
        )

    def send(
        self,
        buffer: Buffer,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Send ``buffer`` to rank ``dst``, which calls `recv`; dst must be another rank."""
        data = self._elements(buffer, "buffer")
        if checks.rank("dst", dst, self.size) == self.rank:
            raise ValueError("dst is this rank itself; send to another rank")
        call = self._message("send", f"to rank {dst}", data, tag, timeout)
        return self._run(call, lambda: self._send(call, data, dst), async_op, self._send_lane)

    def recv(
        self,
        buffer: Buffer,
        src: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Receive into ``buffer`` what rank ``src`` sends; src must be another rank."""
        data = self._elements(buffer, "buffer", writable=True)
        if checks.rank("src", src, self.size) == self.rank:
            raise ValueError("src is this rank itself; receive from another rank")
        call = self._message("recv", f"from rank {src}", data, tag, timeout)
        return self._run(call, lambda: self._recv(call, data, src), async_op)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return once every rank has called it."""
        call = self._call("barrier", "", timeout)
        self._run(call, lambda: self._barrier(call), False)

    def split(self: C, color: int | None, key: int = 0) -> C | None:
        """Make one communicator per ``color``, ranks ordered by (``key``, rank); None: in none."""
        if color is not None and checks.integer("color", color) < 0:
            raise ValueError(
                f"color is {color}, but colors are not negative; None leaves this rank out"
            )
        key = checks.integer("key", key)
        call = self._call("split", "", None)
        made: list[C | None] = []
        self._run(call, lambda: made.append(self._split(call, color, key)), False)
        return made[0]

    def abort(self, reason: str) -> None:
        """Give up: every rank that waits, or comes later, gets `PeerLost` with ``reason``."""
        self._check_open("abort")
        error = PeerLost(f"{self._where('abort')}: this rank gave up: {reason}", [self.rank])
        self._fail(error, reason)

    def close(self) -> None:
        """Leave the group, once what was called is complete; may be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._send_lane.close()
        self._main_lane.close()
        self._leave()

    def __enter__(self: C) -> C:
        """Return the communicator itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, after `abort` when the block ended in an error."""
        if error is not None and not self._closed:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    # What a subclass does. A source is never written to unless it is the target.

    @abstractmethod
    def _elements(self, buffer: Buffer, name: str, *, writable: bool = False) -> E:
        """Return the elements of the argument called ``name``; raise what is wrong with it."""

    @abstractmethod
    def _all_reduce(self, call: Call, source: E, target: E, op: ReduceOp) -> None: ...

    @abstractmethod
    def _broadcast(self, call: Call, data: E, root: int) -> None: ...

    @abstractmethod
    def _all_gather(self, call: Call, source: E, target: E, counts: list[int]) -> None: ...

    @abstractmethod
    def _reduce_scatter(
        self, call: Call, source: E, target: E, counts: list[int], op: ReduceOp
    ) -> None: ...

    @abstractmethod
    def _all_to_all(
        self, call: Call, source: E, target: E, sent: list[int], received: list[int]
    ) -> None: ...

    @abstractmethod
    def _send(self, call: Call, data: E, dst: int) -> None: ...

    @abstractmethod
    def _recv(self, call: Call, data: E, src: int) -> None: ...

    @abstractmethod
    def _barrier(self, call: Call) -> None: ...

    @abstractmethod
    def _split(self: C, call: Call, color: int | None, key: int) -> C | None: ...

    @abstractmethod
    def _announce(self, error: CommunicatorError, reason: str) -> None:
        """Tell the other ranks that this one failed with ``error``, and wake those that wait."""

    @abstractmethod
    def _leave(self) -> None:
        """Tell the other ranks goodbye and free everything; nothing runs any more."""

    # Order, numbers and errors.

    def _call(self, name: str, arguments: str, timeout: float | None) -> Call:
        limit = self.timeout if timeout is None else checks.seconds("timeout", timeout)
        return Call(name, arguments, limit)

    def _message(self, name: str, peer: str, data: E, tag: int, timeout: float | None) -> Call:
        call = self._call(name, f"{data}, tag={checks.integer('tag', tag)}", timeout)
        call.peer = peer
        return call

    def _run(
        self, call: Call, body: Callable[[], None], async_op: bool, lane: Lane | None = None
    ) -> Work | None:
        def turn(await_turn: Callable[[], None]) -> None:
            try:
                await_turn()
                call.deadline = time.monotonic() + call.limit
                self._check_failure(call)
                body()
            except CommunicatorError as error:
                self._fail(error, str(error))
                raise
            except BaseException as error:
                reason = f"{call.title} ended in {type(error).__name__}: {error}"
                self._fail(CommunicatorError(f"{self._where(call.title)}: {reason}"), reason)
                raise

        with self._lock:  # numbers in the order of the turns
            self._check_open(call.name)
            # Collectives are counted together, messages for each direction of each pair.
            counter = f"{call.name} {call.peer}" if call.peer else "collectives"
            self._numbers[counter] += 1
            call.number = self._numbers[counter]
            lane = lane or self._main_lane
            elsewhere = async_op and self.concurrent
            task = lane.submit(turn, self._overdue(call), async_op=elsewhere)
        if not elsewhere:
            task.run()
        if async_op:
            return task
        task.wait()
        return None

    def _where(self, title: str) -> str:
        return f"{title} on rank {self.rank} of {self.size} ({self.backend})"

    def _overdue(self, call: Call) -> Callable[[float], Timeout]:
        def make(seconds: float) -> Timeout:
            missing = call.waits_for()
            what = timeout_text(missing, seconds) if missing else f"not complete in {seconds:g} s."
            return Timeout(f"{self._where(call.title)}: {what}", missing)

        return make

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise CommunicatorError(
                f"{self._where(name)}: this communicator is closed. Make a new one."
            )

    def _check_failure(self, call: Call) -> None:
        first = self._failure
        if first is not None:
            raise type(first)(
                f"{self._where(call.title)}: not started, this communicator failed before "
                f"({first}). Make a new one.",
                first.ranks,
            )

    def _fail(self, error: CommunicatorError, reason: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._announce(error, reason)
