"""A second thread, or a signal handler, uses a communicator in whose operation a rank waits.

Whatever it does: an error of the communicator or an effect after the operation, within the limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract.failures import ones
from support.rank_pool import RankPool

from tagi_ddp.communicators import CommunicatorError

LIMIT = 4.0  # of the communicator, in seconds
LATE = 0.3  # seconds after which the last rank comes

# What rank 0 waits in.
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda c: c.all_reduce(ones()),
    "large all_reduce": lambda c: c.all_reduce(ones(500_000)),
    "barrier": lambda c: c.barrier(),
    "wait": lambda c: c.all_reduce(ones(), async_op=True).wait(),
    "message": lambda c: c.recv(ones(), c.size - 1) if c.rank == 0 else c.send(ones(), 0),
}


def fork_in_between(comm: Any) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with contextlib.suppress(CommunicatorError):
                comm.barrier()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


# What comes in between.
ACTIONS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda c: c.all_reduce(np.ones(2)),
    "barrier": lambda c: c.barrier(),
    "close": lambda c: c.close(),
    "abort": lambda c: c.abort("a test"),
    "check": lambda c: c.check(),
    "fork": fork_in_between,
}


def ended(call: Callable[[], Any]) -> BaseException | None:
    """Return the error in which ``call`` ends, if it does."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def interrupt_operation(comm: Any, operation: str, action: str, by: str) -> tuple[str, float]:
    """Return how the operation of this rank ended, and its seconds."""
    comm.barrier()
    act, run = ACTIONS[action], OPERATIONS[operation]
    if comm.rank == comm.size - 1:
        time.sleep(LATE)
    began = time.monotonic()
    outcomes: list[Any] = []
    timer: threading.Timer | None = None
    before = signal.getsignal(signal.SIGUSR2)
    if comm.rank == 0:

        def interrupt() -> None:
            if by == "signal":
                os.kill(os.getpid(), signal.SIGUSR2)
            else:
                outcomes.append(ended(lambda: act(comm)))

        def handle(*_: object) -> None:
            act(comm)

        signal.signal(signal.SIGUSR2, handle)
        timer = threading.Timer(LATE / 3, interrupt)
        timer.start()
    try:
        if operation == "message" and 0 < comm.rank < comm.size - 1:
            return "no part", 0.0
        outcome = ended(lambda: run(comm))
        # The others, too, do what the second thread does, if it is an operation of all.
        if comm.rank > 0 and action in ("all_reduce", "barrier") and by == "thread":
            ended(lambda: act(comm))
    finally:
        if timer is not None:
            timer.join(2 * LIMIT)
            assert not timer.is_alive(), "the second thread hangs"
            signal.signal(signal.SIGUSR2, before)
    assert all(each is None or isinstance(each, CommunicatorError) for each in outcomes), outcomes
    assert outcome is None or isinstance(outcome, CommunicatorError), outcome
    return type(outcome).__name__, time.monotonic() - began


class InterruptsContract:
    """At every number of ranks from 2 on."""

    @pytest.mark.parametrize(
        "operation",
        ["all_reduce", *(pytest.param(name, marks=pytest.mark.slow) for name in [*OPERATIONS][1:])],
    )
    def test_interrupted(self, pool: RankPool, size: int, operation: str) -> None:
        for action in ACTIONS:
            for by in ("thread", "signal"):
                arguments = (operation, action, by)
                found = pool.run(
                    interrupt_operation,
                    *arguments,
                    size=size,
                    timeout=LIMIT,
                    limit=5 * LIMIT,
                    fresh=True,
                )
                assert all(seconds < 2 * LIMIT for _, seconds in found), arguments
                if action in ("check", "fork"):  # these do no harm
                    assert {kind for kind, _ in found} <= {"NoneType", "no part"}, arguments
