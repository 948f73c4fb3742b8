"""An operation of NCCL under way: how it ends, whether it is waited for or not."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from tagi_ddp._backend import NcclOperation
from tagi_ddp.communicators.call import Call
from tagi_ddp.communicators.errors import CommunicatorError, Timeout, what_happened
from tagi_ddp.communicators.nccl.handshake import StreamHandshake
from tagi_ddp.communicators.nccl.plan import Plan

_MOMENT = 0.05  # seconds


class NcclWork:
    """What ``async_op=True`` returns on devices."""

    def __init__(
        self,
        call: Call,
        plan: Plan,
        operation: NcclOperation,
        handshake: StreamHandshake,
        where: str,
        fail: Callable[[CommunicatorError, str], None],
    ) -> None:
        """Follow ``operation``; ``fail`` breaks the communicator."""
        self.number = call.number
        self._call = call
        self._plan: Plan | None = plan
        self._operation = operation
        self._handshake = handshake
        self._where = where
        self._fail = fail
        self._lock = threading.Lock()
        self._complete = False
        self._error: CommunicatorError | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Block until complete; raise its error if it failed.

        ``timeout`` in seconds limits this wait only: the operation goes on after the `Timeout`.
        """
        limit = self._call.limit if timeout is None else timeout
        end = time.monotonic() + limit
        while not self._poll(end):
            if timeout is None and not math.isinf(self._call.deadline):
                end = self._call.deadline + 1.0  # it began late, and ends by its own limit
            else:
                missing = self._call.waits_for()
                what = f"not complete in {limit:g} s"
                if math.isinf(self._call.deadline):
                    what += ": the work before it in the caller's stream is not"
                text = f"{self._where}: {what}. It goes on; wait again."
                raise Timeout(text, missing)
        self._plan = None

    def done(self) -> bool:
        """Tell, without waiting for it, whether it is complete or has failed."""
        try:
            return self.poll()
        except CommunicatorError:
            return True

    def order(self) -> None:
        """Let what the caller's stream gets from now on come after it; the host does not wait.

        If it fails, the next operation says so. For host objects, `wait`.
        """
        plan = self._plan
        if plan is None:
            return
        if plan.stream is None:
            self.wait()
            return
        self._order(plan.stream)

    def finish(self) -> None:
        """Carry out what is left to do with the result, before anything else uses it."""
        plan = self._plan
        if plan is None or plan.after is None:
            return
        if plan.stream is None:
            self.wait()
            plan.after()
        else:
            self._order(plan.stream)
            plan.after()
            self._operation.extend(plan.stream)

    def settle(self, stream: int | None) -> None:
        """Let what is done from now on, in ``stream`` or on the host, come after it."""
        if stream is None:
            self.wait()
        else:
            self._order(stream)

    def poll(self) -> bool:
        """Tell, without waiting for it, whether it is complete; raise its error if it failed."""
        return self._poll(0.0)

    def _order(self, stream: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._operation.order(stream)
        except RuntimeError as error:
            self._error = CommunicatorError(f"{self._where}: the backend failed: {error}")
            self._fail(self._error, what_happened(self._error))
            raise self._error from error

    def _poll(self, end: float) -> bool:
        # The thread that looks after works has the lock for a moment.
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
                self._fail(error, what_happened(error))
            raise
        finally:
            self._lock.release()


class Group:
    """The `Work` of a group of operations, from the block's end on."""

    work: NcclWork | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Block until complete; raise its error if it failed."""
        if self.work is not None:
            self.work.wait(timeout)

    def done(self) -> bool:
        """Tell, without blocking, whether it is complete or has failed."""
        return self.work is None or self.work.done()

    def order(self) -> None:
        """Let what the caller's stream gets from now on come after it; the host does not wait."""
        if self.work is not None:
            self.work.order()
