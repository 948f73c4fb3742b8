"""What the ranks agree on at a step, on a device: nobody waits for the host to learn it."""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tagi_ddp._backend import CAP_FACTORS, Contribution, cap_factor

# A refused step is told this many steps later, when its outcome has long arrived: the same number
# on all ranks, which so stop together.
LAG = 8


class Word(IntEnum):
    """What a rank says of a step: a column of the table of all ranks."""

    SAMPLES = 0
    FINISHED = 1
    FINITE = 2
    WRITTEN = 3  # 0 where an aborted operation has left zeros; the last one


def words_of(contribution: Contribution, deltas: Tensor) -> Tensor:
    """Return what a rank tells the others, int64 by `Word`, on the device of its ``deltas``."""
    both = _both_words(contribution.batch, contribution.finished, deltas.device)
    if not contribution.batch:
        finite: Tensor = both[0].clone()
        return finite
    largest = torch.linalg.vector_norm(deltas, math.inf)  # one pass; `isfinite` takes five
    words: Tensor = torch.where(largest < math.inf, both[0], both[1])
    return words


@functools.lru_cache(64)
def _both_words(batch: int, finished: bool, device: torch.device) -> Tensor:
    """Return what a rank says of finite deltas, and of others; made without a wait, and once."""
    both = torch.ones(2, len(Word), dtype=torch.int64, device=device)
    both[:, Word.SAMPLES].fill_(batch)
    both[:, Word.FINISHED].fill_(int(finished))
    both[1, Word.FINITE].fill_(0)
    return both


@functools.cache
def _caps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the batches from which the next cap factor holds, and the factors; without a wait."""
    smallest = [batch for batch, _ in CAP_FACTORS[1:]]
    bounds = torch.empty(len(smallest), dtype=torch.int64, device=device)
    factors = torch.empty(len(CAP_FACTORS), device=device)
    for tensor, values in ((bounds, smallest), (factors, [factor for _, factor in CAP_FACTORS])):
        for element, value in zip(tensor, values, strict=True):
            element.fill_(value)
    return bounds, factors


@dataclass
class DeviceAgreement:
    """What follows from the words of all ranks, the ``table``, [ranks, words].

    The others are tensors of one element, or a number where the host knows it. ``divisor`` None: 1.
    """

    table: Tensor
    refused: Tensor
    divisor: Tensor | None
    cap: Tensor | float

    @classmethod
    def of_all(cls, table: Tensor, average: bool) -> DeviceAgreement:
        """Derive it; nothing applies unless all ranks have written their words."""
        samples = table[:, Word.SAMPLES].sum()
        agreed = table[:, Word.FINITE :].all()  # and written
        refused = torch.logical_or(agreed.logical_not_(), samples == 0)
        divisor, batch = None, samples
        if average:
            divisor = (table[:, Word.SAMPLES] > 0).sum().clamp_(min=1)
            batch = (samples + divisor - 1) // divisor
        bounds, factors = _caps(table.device)
        cap = factors.take(torch.bucketize(batch, bounds, right=True))
        return cls(table, refused, divisor, cap)

    @classmethod
    def of_one(cls, deltas: Tensor, samples: int, alone_of: int) -> DeviceAgreement:
        """Return that of a rank whose own ``deltas`` apply, as one of ``alone_of`` such ranks."""
        words = words_of(Contribution(samples), deltas)
        cap = cap_factor(samples * alone_of) * math.sqrt(alone_of)
        return cls(words[None], words[Word.FINITE].logical_not(), None, cap)

    def all_finished(self) -> bool:
        """Tell whether all ranks only follow the others; waits for the device."""
        return bool(self.table[:, Word.FINISHED].all())


class Outcomes:
    """Steps whose outcome is on its way to the host."""

    def __init__(self) -> None:
        self._tables: deque[tuple[Tensor, Any]] = deque()
        # Memory for tables of as many ranks, and their events.
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}

    def add(self, table: Tensor) -> None:
        """Send a step's words to the host."""
        free = self._free.get(len(table))
        here, event = free.pop() if free else _place_for(table)
        here.copy_(table, non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(table.device))
        self._tables.append((here, event))

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks that made an earlier step be refused, once; else an empty list.

        Looks at steps that are `LAG` steps old, or at ``everything`` so far.
        """
        while len(self._tables) >= (1 if everything else LAG):
            table, event = self._tables.popleft()
            if event is not None:
                event.synchronize()
            self._free.setdefault(len(table), []).append((table, event))
            said = enumerate(table.tolist())
            if refused := [r for r, words in said if words[Word.WRITTEN] > words[Word.FINITE]]:
                return refused
        return []


def _place_for(table: Tensor) -> tuple[Tensor, Any]:
    """Return memory of the host for a table, and the event after which it is there."""
    if not table.is_cuda:
        return torch.empty_like(table), None
    return torch.empty(table.shape, dtype=table.dtype, pin_memory=True), torch.cuda.Event()
