"""Signals to a command: those that end it, and those for the ranks of ``tagi-ddp run``."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_AGAIN = 1.0  # seconds within which a second ending signal counts as the same one
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)

for_ranks: list[int] = []
"""Signals for the ranks that have not been sent to them yet, in order of arrival."""

forwarded: list[int] = []
"""The signals for the ranks that have arrived since the ranks were started."""


_ended_at = -math.inf


class Ended(SystemExit):
    """A signal of number ``number`` ends this command."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def end_by_signals() -> None:
    """Raise `Ended` on signals that end this command, which then ends its processes."""
    for number in _ENDING:
        _handle(number, _end)


def keep_for_ranks() -> None:
    """Append SIGUSR1 and SIGUSR2 to `for_ranks` when they arrive."""
    for number in _FOR_RANKS:
        _handle(number, _keep)


def _handle(number: signal.Signals, handler: signal._HANDLER) -> None:
    if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP; keep that.
        signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    # A closed terminal and `timeout` send it twice. A later one ends the ranks' grace period.
    global _ended_at
    now = time.monotonic()
    if now - _ended_at > _AGAIN:
        _ended_at = now
        raise Ended(number)


def _keep(number: int, _: FrameType | None) -> None:
    for_ranks.append(number)
    forwarded.append(number)
