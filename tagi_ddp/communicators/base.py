"""The base of the communicators written in Python: arguments, order, numbers and errors."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tagi_ddp import checks
from tagi_ddp.communicators import buffers, errors, guard
from tagi_ddp.communicators.communicator import Buffer, Communicator, ReduceOp, Work
from tagi_ddp.communicators.operations import Call, Inside, OperationQueue, Ticket

E = TypeVar("E", bound=buffers.Elements)
R = TypeVar("R")
T = TypeVar("T")


class BaseCommunicator(guard.Closing, Generic[E, R]):
    """A rank that checks arguments, numbers calls and runs them in order; subclasses move the data.

    ``E`` describes a buffer. ``R`` is the result that the method of a collective returns to
    `_collective`: None, or an operation to start. Sends have a queue of their own: ranks that send
    to each other with ``async_op=True`` and then receive do not block one another.
    """

    backend: str
    device = "cpu"
    concurrent = True
    """True if asynchronous operations may run on another thread; else they run within the call."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        """Make rank ``rank`` of ``size``; ``timeout`` in seconds limits every wait."""
        self.rank, self.size = rank, size
        self.timeout = timeout
        self._lock = threading.RLock()
        self._numbers: Counter[str] = Counter()
        self._last = "init"  # the title of the last collective
        self._operations = OperationQueue(f"tagi_ddp {self.backend} operations")
        self._messages_out = OperationQueue(f"tagi_ddp {self.backend} messages")
        self._failure: errors.CommunicatorError | None = None
        self._closed = False
        self._process = os.getpid()
        self._inside = Inside()  # the threads in a blocking operation
        self.purpose = ""  # of the next calls; ranks compare it, too

    @property
    def timeout(self) -> float:
        """The default limit of every wait, in seconds."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = checks.seconds("timeout", seconds)

    # Operations, as described in `Communicator`.

    def empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float32"
    ) -> npt.NDArray[Any]:
        """Return zeros; these ranks share no memory."""
        return np.zeros(shape, dtype)

    def all_reduce(
        self,
        buffer: Buffer,
        op: ReduceOp = "sum",
        *,
        out: Buffer | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Reduce ``buffer`` over all ranks into ``out``, in place if ``out`` is None."""
        source = self._elements(buffer, "buffer", writable=out is None)
        target = source if out is None else self._elements(out, "out", writable=True)
        buffers.check_op(op, source.dtype)
        buffers.check_result(source, target, source.count, in_place=True)
        call = self._call("all_reduce", f"{source}, op={op}", timeout)
        return self._collective(call, lambda: self._all_reduce(call, source, target, op), async_op)

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
        return self._collective(call, lambda: self._broadcast(call, data, root), async_op)

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
        sizes = [source.count] * self.size
        if counts is not None:
            sizes = buffers.check_counts(counts, "counts", self.size, target, "out")
        buffers.check_count(source, "buffer", sizes[self.rank])
        buffers.check_result(source, target, sum(sizes))
        call = self._call("all_gather", f"{source.dtype}{sizes}", timeout)
        return self._collective(
            call, lambda: self._all_gather(call, source, target, sizes), async_op
        )

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
        """Reduce ``buffer`` over all ranks and write slice r of the result to rank r's ``out``."""
        source = self._elements(buffer, "buffer")
        target = self._elements(out, "out", writable=True)
        buffers.check_op(op, source.dtype)
        sizes = buffers.check_counts(counts, "counts", self.size, source, "buffer")
        buffers.check_result(source, target, sizes[self.rank])
        call = self._call("reduce_scatter", f"{source.dtype}{sizes}, op={op}", timeout)
        return self._collective(
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
        return self._collective(
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
        arguments = f"{data}, tag={buffers.check_integer('tag', tag)}"
        buffers.check_other("dst", dst, self.rank, self.size, "send to")
        call = self._call("send", arguments, timeout, dst)
        return self._run(call, lambda: self._message(call, data, dst), async_op)

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
        arguments = f"{data}, tag={buffers.check_integer('tag', tag)}"
        buffers.check_other("src", src, self.rank, self.size, "receive from")
        call = self._call("recv", arguments, timeout, src)
        return self._run(call, lambda: self._message(call, data, src), async_op)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return once every rank has called it."""
        call = self._call("barrier", "", timeout)
        self._run(call, lambda: self._barrier(call), False)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make a communicator per ``color``, ranks ordered by (``key``, rank); None joins none."""
        color, key = buffers.check_color(color), buffers.check_integer("key", key)
        call = self._call("split", "", None)
        return self._submit(call, lambda: self._split(call, color, key), False).result()

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """Give up: every rank that waits, or calls later, raises `PeerLost` with ``reason``.

        The error blames ``ranks``; none: this one.
        """
        self._check_open("abort")
        blamed = [checks.rank("ranks", rank, self.size) for rank in ranks] or [self.rank]
        error = errors.PeerLost(f"{self._where('abort')}: this rank gave up: {reason}", blamed)
        self._fail(error, f"rank {self.rank} gave up: {reason}")

    def check(self) -> None:
        """Raise the error that would end the next operation, if it is known; do not wait."""
        self._check_open("check")
        self._check_failure(Call("check", "", 0.0))

    def close(self) -> None:
        """Leave the group once all operations are complete; may be called again."""
        if self._is_forked():
            return  # The parent owns the connections, and its threads may hold locks.
        self._check_outside("close")
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._messages_out.close()
        self._operations.close()
        self._leave()

    def _give_up(self, error: BaseException) -> None:
        guard.abort([self], error)

    # Methods of a subclass. A source is written to only if it is the target.

    @abstractmethod
    def _elements(self, buffer: Buffer, name: str, *, writable: bool = False) -> E:
        """Return the elements of the argument called ``name``, or raise an error that names it."""

    @abstractmethod
    def _all_reduce(self, call: Call, source: E, target: E, op: ReduceOp) -> R: ...

    @abstractmethod
    def _broadcast(self, call: Call, data: E, root: int) -> R: ...

    @abstractmethod
    def _all_gather(self, call: Call, source: E, target: E, counts: list[int]) -> R: ...

    @abstractmethod
    def _reduce_scatter(
        self, call: Call, source: E, target: E, counts: list[int], op: ReduceOp
    ) -> R: ...

    @abstractmethod
    def _all_to_all(
        self, call: Call, source: E, target: E, sent: list[int], received: list[int]
    ) -> R: ...

    @abstractmethod
    def _message(self, call: Call, data: E, peer: int) -> None:
        """Send to ``peer``, or receive from it, as ``call`` says."""

    @abstractmethod
    def _barrier(self, call: Call) -> None: ...

    @abstractmethod
    def _split(self, call: Call, color: int | None, key: int) -> Communicator | None: ...

    @abstractmethod
    def _announce(self, error: errors.CommunicatorError, reason: str) -> None:
        """Send the failure of this rank to the others, and wake the threads that wait."""

    @abstractmethod
    def _leave(self) -> None:
        """Send the other ranks the end, and free everything; no operation runs any more."""

    # Order, numbers and errors.

    def _call(
        self, name: str, arguments: str, timeout: float | None, peer: int | None = None
    ) -> Call:
        self._check_open(name)  # A fork would wait for a lock that nothing frees.
        limit = self.timeout if timeout is None else checks.seconds("timeout", timeout)
        purpose = f", for {self.purpose}" if self.purpose else ""
        return Call(name, arguments + purpose, limit, peer)

    def _collective(self, call: Call, operation: Callable[[], R], async_op: bool) -> Work | None:
        return self._run(call, operation, async_op)

    def _run(self, call: Call, operation: Callable[[], object], async_op: bool) -> Work | None:
        ticket = self._submit(call, operation, async_op)
        if async_op:
            return ticket
        ticket.wait()
        return None

    def _submit(self, call: Call, operation: Callable[[], T], async_op: bool) -> Ticket[T]:
        """Number ``call`` and run it after the previous ones, here or on their queue's thread."""
        queue = self._messages_out if call.name == "send" else self._operations
        elsewhere = async_op and self.concurrent
        if not elsewhere:
            self._check_outside(call.name)
        with nullcontext() if elsewhere else self._inside:
            with self._lock:  # Numbers follow the order of the tickets.
                self._number(call)
                ticket: Ticket[T] = queue.ticket(partial(self._overdue, call))
                execute = partial(self._execute, call, ticket, operation)
                if elsewhere:
                    queue.start(ticket, execute)
            if not elsewhere:
                ticket.run(execute)
        return ticket

    def _number(self, call: Call) -> None:
        """Number ``call``: collectives count together, messages by pair and direction."""
        self._check_open(call.name)
        counter = "collectives" if call.peer is None else f"{call.name} {call.peer}"
        self._numbers[counter] += 1
        call.number = self._numbers[counter]
        if call.peer is None:
            call.previous, self._last = self._last, call.title

    def _execute(self, call: Call, ticket: Ticket[T], operation: Callable[[], T]) -> T:
        try:
            ticket.await_previous()
            self._check_failure(call)
            call.deadline = time.monotonic() + call.limit
            return operation()
        except BaseException as error:
            self._break(call, error)
            raise

    def _break(self, call: Call, error: BaseException) -> None:
        """Break the communicator on all ranks after the error of an operation."""
        if isinstance(error, errors.CommunicatorError):
            self._fail(error)
        else:
            reason = f"{call.title} ended in {type(error).__name__}: {error}"
            failure = errors.CommunicatorError(f"{self._where(call.title)}: {reason}")
            self._fail(failure, f"rank {self.rank} gave up: {reason}")

    def _where(self, title: str) -> str:
        return f"{title} on rank {self.rank} of {self.size} ({self.backend})"

    def _overdue(self, call: Call, seconds: float) -> errors.Timeout:
        missing = call.waits_for()
        what = (
            errors.timeout_text(missing, seconds, "")
            if missing
            else f"not complete in {seconds:g} s."
        )
        return errors.Timeout(f"{self._where(call.title)}: {what}", missing)

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _check_open(self, name: str) -> None:
        if self._closed or self._is_forked():
            forked = f"that of process {self._process}, of which this is a fork"
            what = "closed" if self._closed else forked
            raise errors.CommunicatorError(
                f"{self._where(name)}: this communicator is {what}. Make a new one."
            )

    def _check_outside(self, name: str) -> None:
        """Raise if this thread is in an operation: its caller is then a signal handler."""
        if self._inside.here:
            raise errors.CommunicatorError(f"{self._where(name)}: {errors.REENTERED}")

    def _check_failure(self, call: Call) -> None:
        if self._failure is not None:
            raise errors.not_started(self._where(call.title), self._failure)

    def _fail(self, error: errors.CommunicatorError, reason: str = "") -> None:
        """Break the communicator; the others get ``reason``, by default the text of ``error``."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._announce(error, reason or errors.what_happened(error))
