"""The connections between ranks: each of a thousand ranks has 28.

Rank r sends to r + j * 4^i, modulo the number of ranks, for j = 1, 2, 3 and every i (dissemination:
Hensgen, Finkel and Manber 1988, in radix 4). All ranks know of all others after log4(ranks) rounds,
and a message reaches any rank in as many steps. The loss of a few ranks does not disconnect the
others. Up to eight ranks, all are neighbours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_RADIX = 4


@dataclass(frozen=True)
class Round:
    """One exchange of a rank with some neighbours.

    It knows of ``known`` ranks by then: itself and those before it. So does each of ``senders``.
    """

    known: int
    receivers: tuple[int, ...]
    senders: tuple[int, ...]


def rounds(rank: int, size: int) -> tuple[Round, ...]:
    """Return the rounds after which every rank knows of all."""
    return tuple(
        Round(
            step,
            tuple((rank + factor * step) % size for factor in _factors(step, size)),
            tuple((rank - factor * step) % size for factor in _factors(step, size)),
        )
        for step in _steps(size)
    )


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks with which ``rank`` has a connection, in their order."""
    return sorted({other for r in rounds(rank, size) for other in r.receivers + r.senders})


def span(rank: int, known: int, size: int) -> list[int]:
    """Return the ``known`` ranks that end with ``rank``."""
    return [(rank - back) % size for back in range(known)]


def children(rank: int, origin: int, size: int) -> list[int]:
    """Return the ranks to which ``rank`` forwards a broadcast of ``origin``: all get it once."""
    distance = (rank - origin) % size
    return [
        (rank + factor * step) % size
        for step in _steps(size)
        if distance % (_RADIX * step) == 0
        for factor in _factors(step, size - distance)
    ]


def next_hop(
    rank: int, target: int, size: int, gone: Collection[int], backwards: bool = False
) -> int | None:
    """Return the neighbour nearest to ``target`` in this direction that is not ``gone``, if any."""
    sign = -1 if backwards else 1
    left = sign * (target - rank) % size
    steps = [
        (sign * (other - rank) % size, other)
        for other in neighbours(rank, size)
        if other not in gone
    ]
    return max((step for step in steps if step[0] <= left), default=(0, None))[1]


def _steps(size: int) -> list[int]:
    found = []
    step = 1
    while step < size:
        found.append(step)
        step *= _RADIX
    return found


def _factors(step: int, size: int) -> range:
    return range(1, min(_RADIX, -(-size // step)))
