"""The handshake of an operation in a stream, which starts before ranks compare their calls."""

from __future__ import annotations

import json
import math
import time

from tagi_ddp._backend import NcclOperation
from tagi_ddp.communicators.control.handshake import Handshake
from tagi_ddp.communicators.errors import Mismatch

_FEW = 8  # ranks for which messages between all cost less than NCCL's call
_HELD = 32  # messages that may be held, if this rank does not wait for their operations
_SLICE = 0.02  # seconds at the device between two reads of the control channel


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
