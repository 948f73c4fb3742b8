"""Operations of NCCL, from the call that enqueues them to their end, awaited or not."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tagi_ddp._backend import NcclOperation
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.errors import REENTERED, CommunicatorError, Mismatch, Timeout
from tagi_ddp.communicators.operations import Inside

_FEW = 8  # ranks for which messages between all cost less than NCCL's call
_HELD = 32  # messages that may be held, if this rank does not wait for their operations
_SLICE = 0.02  # seconds at the device between two reads of the control channel
_MOMENT = 0.05  # seconds for which the helper may hold the lock


class StreamHandshake(Handshake):
    """A collective that starts before the messages of the others arrive.

    A few ranks send their calls to all others, which compare. More ranks send them to the next rank
    only: if any calls differ, those of two neighbours do. If the expected message differs by rank
    (in all_to_all), all ranks send to all.
    """

    def enter(self, messages: dict[int, str], expected: dict[int, str], awaited: bool) -> None:
        """Send this call to the ranks that compare it; do not wait for theirs.

        ``messages`` and ``expected`` are texts by rank, if the expected message differs by rank.
        Unless the operation is ``awaited``, a few messages may be held: they are sent with later
        ones, or when the communicator looks after its operations.
        """
        call, size = self.call, len(self._peers) + 1
        call.waits_for = lambda: self._at_fault(self._unfinished())
        few = size <= _FEW
        after = self._peers if few else [(self._rank + 1) % size]
        before = self._peers if few else [(self._rank - 1) % size]
        messages = messages or dict.fromkeys(after, "")
        self._expected = expected or dict.fromkeys(before, "")
        contents = {
            text: json.dumps([call.name, call.arguments, text]).encode()
            for text in {*messages.values(), *self._expected.values()}
        }
        self._fitting = {rank: contents[text] for rank, text in self._expected.items()}
        if not self._peers:
            self._interrupted()
            return
        with self._channel.sending(most_held=0 if awaited else _HELD) as notes:
            for rank, text in messages.items():
                notes.enter([rank], self._own, call.number, contents[text])
        self._channel.glance(self._interrupted)

    def await_all(self) -> None:
        """Return once the calls of all ranks fit this one."""
        if not self._until(self._all_fit, self.call.deadline):
            self._time_out(self.call.waits_for())

    def follow(self, operation: NcclOperation, end: float) -> bool:
        """Wait until ``end`` at most; return whether it is complete, and the ranks' calls fit.

        The limit of the call counts from the time when the operation begins on the device.
        """
        call = self.call
        while True:
            now = time.monotonic()
            try:
                if operation.complete(min(_SLICE, max(0.0, end - now))):
                    break
                if math.isinf(call.deadline) and operation.started():
                    call.deadline = time.monotonic() + call.limit
            except RuntimeError as error:
                self.explain(error)
            self.poll()
            if time.monotonic() > end:
                return False
        call.deadline = min(call.deadline, time.monotonic() + call.limit)
        if not self._fits() and not self._until(self._all_fit, min(end, call.deadline)):
            if time.monotonic() < call.deadline:
                return False
            self._time_out(call.waits_for())
        for rank in self._expected:
            self._notes.entered.pop((rank, self._theirs, call.number), None)
        return True

    def _last_call(self) -> str:
        """Return "": operations on a device run behind the calls of their ranks."""
        return ""

    def _interrupted(self) -> bool:
        # A rank closes once all have completed its calls: it takes part in no other.
        self._fits()
        self._check(self._unfinished(), self._gone())
        return False

    def _all_fit(self) -> bool:
        # A broadcast is complete on ranks that have its data, even if another died before its call.
        if self._fits():
            return True
        entered, number = self._notes.entered, self.call.number
        missing = [rank for rank in self._expected if (rank, self._theirs, number) not in entered]
        self._check(missing, self._gone())
        return False

    def _fits(self) -> bool:
        """Return whether all messages have arrived; raise Mismatch for one that does not fit."""
        call, arrived = self.call, 0
        for rank, expected in self._expected.items():
            message = self._notes.entered.get((rank, self._theirs, call.number))
            if message is None:
                continue
            arrived += 1
            if message == self._fitting[rank]:
                continue
            name, arguments, content = json.loads(message)
            if (name, arguments) != (call.name, call.arguments):
                raise self._mismatch({rank: f"{name}({arguments})"})
            if content != expected:
                raise Mismatch(
                    f"{self.where}: rank {rank} {content}, but this rank {expected}. Make what a "
                    "rank sends what the other expects.",
                    [rank],
                )
        return arrived == len(self._expected)


@dataclass(eq=False)
class NcclWork:
    """An operation, or several as one: the `Work` of a call with buffers on a device.

    stream: the caller's; None for host objects. enqueue: the calls of NCCL. after: steps to finish
    the result, in the caller's stream. buffers: kept until the end. messages: a text for each rank
    that compares more than the calls; expected: the texts that fit from those ranks.
    """

    stream: int | None = None
    enqueue: list[Callable[[], None]] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    messages: dict[int, str] = field(default_factory=dict)
    expected: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare; call `begin` once the operation is in its stream."""
        self._handshake: StreamHandshake | None = None
        self._lock = threading.Lock()
        self._complete = False
        self._error: CommunicatorError | None = None

    def gather(self, works: Sequence[NcclWork]) -> None:
        """Become a group of operations of one stream; raise ValueError if they have several."""
        streams = {work.stream for work in works}
        if len(streams) > 1:
            raise ValueError(
                f"the buffers of a group are of {len(streams)} streams; make a group for each"
            )
        (self.stream,) = streams
        self.enqueue = [each for work in works for each in work.enqueue]
        self.buffers = [each for work in works for each in work.buffers]
        self.after = [each for work in works for each in work.after]
        self.messages = _joined([work.messages for work in works])
        self.expected = _joined([work.expected for work in works])

    def begin(
        self,
        operation: NcclOperation,
        handshake: StreamHandshake,
        inside: Inside,
        fail: Callable[[CommunicatorError], None],
    ) -> None:
        """Follow ``operation``, which has been enqueued; ``fail`` breaks the communicator."""
        self.call, self._where = handshake.call, handshake.where
        self._operation, self._handshake = operation, handshake
        self._inside, self._fail = inside, fail

    def finish(self) -> None:
        """Run the steps in ``after`` on the result, before anything else uses it."""
        steps = self.after
        if not steps:
            return
        self.order_before(self.stream)
        for step in steps:
            step()
        if self.stream is not None:
            self._operation.extend(self.stream)

    def wait(self, timeout: float | None = None) -> None:
        """Block until complete; raise its error if it failed.

        ``timeout`` in seconds limits this wait only: the operation continues after the `Timeout`.
        """
        if self._handshake is None:  # It is a group of no operations.
            return
        if self._inside.here:
            raise CommunicatorError(f"{self._where}: {REENTERED}")
        with self._inside:
            self.await_end(timeout)

    def await_end(self, timeout: float | None = None) -> None:
        """Do what `wait` does, inside of another operation of this thread."""
        limit = self.call.limit if timeout is None else timeout
        end = time.monotonic() + limit
        while not self.poll(end):
            if timeout is None and not math.isinf(self.call.deadline):
                end = self.call.deadline + 1.0  # It began late, and ends by its own limit.
            else:
                missing = self.call.waits_for()
                what = f"not complete in {limit:g} s"
                if math.isinf(self.call.deadline):
                    what += ": the work before it in the caller's stream is not"
                text = f"{self._where}: {what}. It goes on; wait again."
                raise Timeout(text, missing)
        self.enqueue, self.buffers, self.after = [], [], []  # Keep none of them alive.

    def done(self) -> bool:
        """Return, without blocking, whether it is complete or has failed."""
        try:
            return self.poll()
        except CommunicatorError:
            return True

    def order(self) -> None:
        """Make later work in the caller's stream wait for it; the host does not wait.

        If it fails, the next operation raises the error. For host objects, `wait`.
        """
        if self.buffers:  # It has not been awaited.
            self.order_before(self.stream)

    def order_before(self, stream: int | None) -> None:
        """Make later work in ``stream`` wait for it; None: wait on the host."""
        if stream is None:
            self.wait()
        elif self._handshake is not None:
            if self._error is not None:
                raise self._error
            try:
                self._operation.order(stream)
            except RuntimeError as error:
                self._error = CommunicatorError(f"{self._where}: the backend failed: {error}")
                self._fail(self._error)
                raise self._error from error

    def poll(self, end: float = 0.0) -> bool:
        """Return whether it is complete; raise its error if it failed.

        Wait until ``end``, a time of the monotonic clock; 0: do not wait.
        """
        if self._handshake is None:
            return True
        # The helper of the communicator holds the lock for a moment.
        if not self._lock.acquire(timeout=max(_MOMENT, end - time.monotonic())):
            return False
        try:
            if self._error is not None:
                raise self._error
            if not self._complete:
                self._complete = self._handshake.follow(self._operation, end)
            return self._complete
        except CommunicatorError as error:
            if self._error is None:
                self._error = error
                self._fail(error)
            raise
        finally:
            self._lock.release()


def _joined(texts: list[dict[int, str]]) -> dict[int, str]:
    ranks = {rank for text in texts for rank in text}
    return {rank: "; ".join(text.get(rank, "") for text in texts) for rank in ranks}
