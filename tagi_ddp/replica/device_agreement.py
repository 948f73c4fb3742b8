"""What the ranks agree on at a step, on a device: nobody waits for the host to learn it."""

from __future__ import annotations

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


class Constants:
    """Small tensors that a replica's steps need again and again, made without a wait.

    Its own, as another replica's stream may not have come to making them yet.
    """

    def __init__(self, device: torch.device) -> None:
        bounds, factors = [batch for batch, _ in CAP_FACTORS[1:]], [cap for _, cap in CAP_FACTORS]
        self.bounds = torch.empty(len(bounds), dtype=torch.int64, device=device)
        """The batches from which the next of the cap ``factors`` holds."""
        self.factors = torch.empty(len(factors), device=device)
        for tensor, values in ((self.bounds, bounds), (self.factors, factors)):
            for element, value in zip(tensor, values, strict=True):
                element.fill_(value)
        self._words: dict[tuple[int, bool], Tensor] = {}

    def words(self, batch: int, finished: bool) -> Tensor:
        """Return what a rank says of finite deltas, and of others, [2, words]."""
        both = self._words.get((batch, finished))
        if both is None:
            shape = 2, len(Word)
            both = torch.ones(shape, dtype=torch.int64, device=self.bounds.device)
            both[:, Word.SAMPLES].fill_(batch)
            both[:, Word.FINISHED].fill_(int(finished))
            both[1, Word.FINITE].fill_(0)
            self._words[batch, finished] = both
        return both


def words_of(contribution: Contribution, deltas: Tensor, constants: Constants) -> Tensor:
    """Return what a rank tells the others, int64 by `Word`, on the device of its ``deltas``."""
    finite, not_finite = constants.words(contribution.batch, contribution.finished).unbind()
    if not contribution.batch:
        return finite.clone()
    largest = torch.linalg.vector_norm(deltas, math.inf)  # one pass; `isfinite` takes five
    return torch.where(largest < math.inf, finite, not_finite)


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
    def of_all(cls, table: Tensor, average: bool, constants: Constants) -> DeviceAgreement:
        """Derive it; nothing applies unless all ranks have written their words."""
        samples = table[:, Word.SAMPLES].sum()
        agreed = table[:, Word.FINITE :].all()  # and written
        refused = torch.logical_or(agreed.logical_not_(), samples == 0)
        divisor, batch = None, samples
        if average:
            divisor = (table[:, Word.SAMPLES] > 0).sum().clamp_(min=1)
            batch = (samples + divisor - 1) // divisor
        cap = constants.factors.take(torch.bucketize(batch, constants.bounds, right=True))
        return cls(table, refused, divisor, cap)

    @classmethod
    def of_one(
        cls, deltas: Tensor, samples: int, alone_of: int, constants: Constants
    ) -> DeviceAgreement:
        """Return that of a rank whose own ``deltas`` apply, as one of ``alone_of`` such ranks."""
        words = words_of(Contribution(samples), deltas, constants)
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
