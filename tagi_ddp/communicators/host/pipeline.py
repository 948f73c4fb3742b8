"""Large arrays in chunks: while one chunk is on the network, memory works on the next."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from tagi_ddp.communicators.buffers import HostElements, equal_counts
from tagi_ddp.communicators.control.handshake import Handshake, Ready

_SMALL, _LARGE, _SOME = 1 << 20, 1 << 23, 4  # bytes of chunks, and a number that is enough

Stage = Callable[[int], Ready | None]
"""Begins a part of the work on a chunk; returns what waits for its end, if there is anything."""


def chunks_of(elements: HostElements) -> list[slice]:
    """Return chunks of about equal length; small ones only until there are some."""
    size = elements.array.nbytes
    number = max(1, min(size // _SMALL, _SOME), size // _LARGE)
    ends = accumulate(equal_counts(elements.count, number), initial=0)
    return [slice(begin, end) for begin, end in pairwise(ends)]


def pipeline(handshake: Handshake, chunks: int, stages: list[Stage]) -> None:
    """Bring all chunks through all stages, each at another one, in the same order on all ranks."""
    pending: dict[int, Ready | None] = {}
    for tick in range(chunks + len(stages)):
        for stage in reversed(range(len(stages) + 1)):
            chunk = tick - stage
            if 0 <= chunk < chunks:
                if stage > 0 and (ready := pending.pop(chunk)) is not None:
                    handshake.carry(ready)
                if stage < len(stages):
                    pending[chunk] = stages[stage](chunk)
