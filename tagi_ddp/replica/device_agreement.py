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
    WRITTEN = 3  # 0 where an aborted operation has left zeros


def words_of(contribution: Contribution, deltas: Tensor) -> Tensor:
    """Return what a rank tells the others, int64 by `Word`, on the device of its ``deltas``."""
    words = torch.ones(len(Word), dtype=torch.int64, device=deltas.device)
    words[Word.SAMPLES].fill_(contribution.batch)
    words[Word.FINISHED].fill_(int(contribution.finished))
    if contribution.batch:
        largest = torch.linalg.vector_norm(deltas, math.inf)  # one pass; `isfinite` takes five
        words[Word.FINITE].copy_(largest < math.inf)
    return words


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
        given = table[:, Word.SAMPLES]
        samples = given.sum()
        active = (given > 0).sum()
        agreed = table[:, Word.FINITE].all() & table[:, Word.WRITTEN].all()
        refused = (agreed & (active > 0)).logical_not()
        divisor, batch = None, samples
        if average:
            divisor = active.clamp(min=1)
            batch = (samples + divisor - 1) // divisor
        (_, smallest_cap), *larger = CAP_FACTORS
        factor = torch.full_like(batch, smallest_cap, dtype=torch.float32)
        for smallest_batch, larger_cap in larger:
            factor.masked_fill_(batch >= smallest_batch, larger_cap)
        return cls(table, refused, divisor, factor)

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

    def add(self, table: Tensor) -> None:
        """Send a step's words to the host."""
        event = None
        if table.is_cuda:
            pinned = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            table = pinned.copy_(table, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            table = table.clone()  # a graph's next step writes to the same one
        self._tables.append((table, event))

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks that made an earlier step be refused, once; else an empty list.

        Looks at steps that are `LAG` steps old, or at ``everything`` so far.
        """
        while len(self._tables) >= (1 if everything else LAG):
            table, event = self._tables.popleft()
            if event is not None:
                event.synchronize()
            refusing = (table[:, Word.WRITTEN] == 1) & (table[:, Word.FINITE] == 0)
            if refused := torch.nonzero(refusing).flatten().tolist():
                return refused
        return []
