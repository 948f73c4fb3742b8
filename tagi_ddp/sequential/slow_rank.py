"""A line of rank 0, every so often, about a rank that is steadily slower than the others."""

from __future__ import annotations

import logging
import statistics
import time

from tagi_ddp.update.ranks import Ranks

_LOOK = 5.0  # seconds from one look at the ranks' times to the next
_TELL = 60.0  # seconds from one line to the next
_SLOWER = 1.2  # a rank is slow if its time is this multiple of the others' median
_MOST = 10_000  # steps from one look to the next

log = logging.getLogger("tagi_ddp")


class SlowRank:
    """The times of all ranks' own work, which rank 0 compares.

    A rank is named if it is the slowest, and slow, in two periods that follow each other.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._left = 1  # steps until the next look
        self._began = 0.0  # this period
        self._totals: list[int] = []
        self._exchanges = 0
        self._slow: int | None = None  # the slow rank of the last period
        self._told = -_TELL

    def after_step(self) -> None:
        """Look at the times if that is due; this costs less than a tenth of a microsecond."""
        self._left -= 1
        if self._left <= 0:
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        pace = self._ranks.exchange.pace
        totals, exchanges = pace.totals, pace.exchanges
        before, number = self._totals, exchanges - self._exchanges
        passed = now - self._began
        if len(before) == len(totals) and number > 0:
            if passed >= _LOOK:
                seconds = [
                    1e-9 * (total - earlier) / number
                    for total, earlier in zip(totals, before, strict=True)
                ]
                self._compare(seconds, now)
            left = _LOOK - passed if passed < _LOOK else _LOOK  # seconds
            self._left = max(1, min(_MOST, int(number * left / passed)))
            if passed < _LOOK:
                return
        self._began, self._totals, self._exchanges = now, totals, exchanges
        self._left = max(1, self._left)

    def _compare(self, seconds: list[float], now: float) -> None:
        """Compare the ranks' times between two exchanges."""
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = statistics.median(seconds[:slowest] + seconds[slowest + 1 :])
        slow = slowest if seconds[slowest] > _SLOWER * others else None
        tells = self._ranks.communicator.rank == 0 and now - self._told >= _TELL
        if tells and slow is not None and slow == self._slow:
            self._told = now
            log.warning(
                "the others wait for rank %d: between two exchanges it takes %.3g ms for its own "
                "work, and they take %.3g ms",
                slow,
                1e3 * seconds[slow],
                1e3 * others,
            )
        self._slow = slow
