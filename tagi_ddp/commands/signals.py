"""Signals to a command: those that end it, and those for the ranks of ``tagi-ddp run``."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_AGAIN = 1.0  # seconds in which another ending signal is the same one
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)

for_ranks: list[int] = []
"""Signals that have arrived for the ranks and are not sent to them yet, in order of arrival."""


_ended_at = -math.inf


class Ended(SystemExit):
    """A signal of number ``number`` ends this command."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def end_by_signals() -> None:
    """Raise `Ended` on a signal that ends this command, after which started processes are ended."""
    for number in _ENDING:
        _handle(number, _end)


def keep_for_ranks() -> None:
    """Append SIGUSR1 and SIGUSR2 to `for_ranks` when they arrive."""
    for number in _FOR_RANKS:
        _handle(number, _keep)


def _handle(number: signal.Signals, handler: signal._HANDLER) -> None:
    if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored, which stays
        signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    # A closed terminal and `timeout` send it twice. One that comes later ends the ranks' grace.
    global _ended_at
    now = time.monotonic()
    if now - _ended_at > _AGAIN:
        _ended_at = now
        raise Ended(number)


def _keep(number: int, _: FrameType | None) -> None:
    for_ranks.append(number)
