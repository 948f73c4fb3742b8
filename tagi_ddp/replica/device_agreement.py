"""What the ranks agree on at a step, on a device: nobody waits for the host to learn it."""

from __future__ import annotations

import math
from collections import deque
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tagi_ddp._backend import CAP_FACTORS, Contribution

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
        words[Word.FINITE].copy_(torch.isfinite(deltas).all())
    return words


class DeviceAgreement:
    """What follows from the words of all ranks, [ranks, words], as scalar tensors.

    Nothing applies unless all ranks have written theirs. ``alone_of``: how many ranks step alone as
    the only one of the table does.
    """

    def __init__(self, table: Tensor, average: bool, alone_of: int = 1) -> None:
        self.table = table
        samples = table[:, Word.SAMPLES]
        self.samples = samples.sum()
        active = (samples > 0).sum()
        agreed = table[:, Word.FINITE].all() & table[:, Word.WRITTEN].all()
        self.applies = agreed & (active > 0)
        batch = self.samples
        self.divisor = torch.ones_like(batch)
        if average:
            self.divisor = active.clamp(min=1)
            batch = (batch + self.divisor - 1) // self.divisor
        (_, smallest_cap), *larger = CAP_FACTORS
        self.cap = torch.full_like(batch, smallest_cap, dtype=torch.float32)
        for smallest_batch, cap in larger:
            self.cap.masked_fill_(batch * alone_of >= smallest_batch, cap)
        self.cap *= math.sqrt(alone_of)

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
