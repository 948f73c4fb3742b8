"""Signals that announce the end of a job, before which its ranks save a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from tagi_ddp.elastic.connection import launcher_connection
from tagi_ddp.elastic.messages import PREEMPTED

# SLURM, Kubernetes, Open MPI and torchrun announce the end by one of these.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
GRACE = 30.0  # seconds for the checkpoint, which Kubernetes and torchrun leave, too

_EVERY = 0.2  # seconds between two steps in which all ranks ask each other for signals
_MOST = 1000  # steps between those


class Preempted(SystemExit):
    """The end of a rank after a signal, with the status 75.

    All ranks have saved a checkpoint, or this rank leaves the others of an elastic job.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


class Preemption:
    """The signals of this process that announce its end, and the ranks' agreement on them.

    A signal is kept until all ranks are between the same two steps; if there is no such step, it
    has its usual effect in `close`. So does the second signal of a kind, and one to a fork.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """Receive signals, in the main thread, unless the script has a handler for them."""
        self.received: int | None = None
        self._process = os.getpid()
        self._numbers: list[int] = []
        self._communicator: object = None
        self._steps = 0  # between the last two times that the ranks asked each other
        self._left = 0  # until they ask again
        self._last = 0.0
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._receive)
                    self._numbers.append(number)
        self._ask_for_grace(GRACE)

    def _ask_for_grace(self, seconds: float) -> None:
        launcher = launcher_connection()
        if launcher is not None and self._numbers:
            launcher.ask_for_grace(seconds)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._process:
            self.received = number
        else:
            signal.raise_signal(number)

    def is_due(self, communicator: object) -> bool:
        """Count a step; return whether the ranks ask each other after it.

        Ranks of a new ``communicator`` count anew.
        """
        if self._communicator is not communicator:
            self._communicator, self._steps, self._left = communicator, 0, 1
        self._left -= 1
        return not self._left

    def ask(self, gather: Callable[[Any], list[Any]]) -> list[int]:
        """Return the signals of all ranks, 0 for a rank without one; [] if no rank has one.

        ``gather`` returns the values of all ranks.
        """
        passed = time.monotonic() - self._last
        seconds = passed / self._steps if self._steps else _EVERY  # of a step; not known at first
        everyone = gather([self.received or 0, seconds])
        self._last = time.monotonic()
        slowest = max(seconds for _, seconds in everyone)
        self._steps = self._left = max(1, min(_MOST, int(_EVERY / max(slowest, 1e-6))))
        numbers = [number for number, _ in everyone]
        return numbers if any(numbers) else []

    def close(self) -> None:
        """Restore the effect of signals; one that has come has it now, unless an error rises."""
        for number in self._numbers:
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL)
        self._ask_for_grace(0.0)
        self._numbers = []
        if self.received is not None and sys.exc_info()[0] is None:
            signal.raise_signal(self.received)
