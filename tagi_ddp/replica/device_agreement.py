"""The agreement of the ranks on a step, on a device, without a wait of the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tagi_ddp._backend import CAP_FACTORS, Contribution

# A refused step is reported this many steps later, when its outcome has long arrived. The number is
# the same on all ranks, so they stop together.
LAG = 8


class Field(IntEnum):
    """A field of a rank's vote on a step: a column of the table of all ranks."""

    SAMPLES = 0
    FINISHED = 1
    FINITE = 2
    WRITTEN = 3  # 0 if an aborted operation has left zeros; the last field


class Constants:
    """Small tensors that each step of a replica needs, made without a wait.

    Each replica has its own, as another one's stream may not have filled its tensors yet.
    """

    def __init__(self, device: torch.device, cap_factor: Callable[[int], float]) -> None:
        """Make those of a replica with this cap factor of a batch."""
        self.cap_factor = cap_factor
        bounds = [batch for batch, _ in CAP_FACTORS[1:]]
        factors = [cap_factor(batch) for batch, _ in CAP_FACTORS]
        self.bounds = torch.empty(len(bounds), dtype=torch.int64, device=device)
        """The batch sizes from which the next of the cap ``factors`` holds."""
        self.factors = torch.empty(len(factors), device=device)
        for tensor, values in ((self.bounds, bounds), (self.factors, factors)):
            for element, value in zip(tensor, values, strict=True):
                element.fill_(value)
        self._votes: dict[tuple[int, bool], Tensor] = {}

    def votes(self, batch: int, finished: bool) -> Tensor:
        """Return a rank's votes for finite deltas, and for others, [2, fields]."""
        both = self._votes.get((batch, finished))
        if both is None:
            shape = 2, len(Field)
            both = torch.ones(shape, dtype=torch.int64, device=self.bounds.device)
            both[:, Field.SAMPLES].fill_(batch)
            both[:, Field.FINISHED].fill_(int(finished))
            both[1, Field.FINITE].fill_(0)
            self._votes[batch, finished] = both
        return both


def vote_of(contribution: Contribution, deltas: Tensor, constants: Constants) -> Tensor:
    """Return a rank's vote, int64 by `Field`, on the device of its ``deltas``."""
    finite, not_finite = constants.votes(contribution.batch, contribution.finished).unbind()
    if not contribution.batch:
        return finite.clone()
    largest = torch.linalg.vector_norm(deltas, math.inf)  # One pass; `isfinite` takes five.
    return torch.where(largest < math.inf, finite, not_finite)


@dataclass
class DeviceAgreement:
    """The agreement that follows from the votes of all ranks, the ``table``, [ranks, fields].

    The others are tensors of one element, or a number if the host knows it. ``divisor`` None: 1.
    """

    table: Tensor
    refused: Tensor
    divisor: Tensor | None
    cap: Tensor | float

    @classmethod
    def of_all(cls, table: Tensor, average: bool, constants: Constants) -> DeviceAgreement:
        """Return the agreement of all ranks; nothing applies unless all have written votes."""
        samples = table[:, Field.SAMPLES].sum()
        agreed = table[:, Field.FINITE :].all()  # FINITE and WRITTEN
        refused = torch.logical_or(agreed.logical_not_(), samples == 0)
        divisor, batch = None, samples
        if average:
            divisor = (table[:, Field.SAMPLES] > 0).sum().clamp_(min=1)
            batch = (samples + divisor - 1) // divisor
        cap = constants.factors.take(torch.bucketize(batch, constants.bounds, right=True))
        return cls(table, refused, divisor, cap)

    @classmethod
    def of_one(
        cls, deltas: Tensor, samples: int, alone_of: int, constants: Constants
    ) -> DeviceAgreement:
        """Return that of a rank which applies its own ``deltas``, as one of ``alone_of`` ranks."""
        vote = vote_of(Contribution(samples), deltas, constants)
        cap = constants.cap_factor(samples * alone_of) * math.sqrt(alone_of)
        return cls(vote[None], vote[Field.FINITE].logical_not(), None, cap)

    def all_finished(self) -> bool:
        """Return whether all ranks only follow the others; waits for the device."""
        return bool(self.table[:, Field.FINISHED].all())


class Outcomes:
    """The outcomes of steps, on their way to the host."""

    def __init__(self) -> None:
        self._tables: deque[tuple[Tensor, Any]] = deque()
        # Free memory of the host, by the number of ranks of a table, and its events.
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}

    def add(self, table: Tensor) -> None:
        """Send the votes on a step to the host."""
        free = self._free.get(len(table))
        here, event = free.pop() if free else _buffer_for(table)
        here.copy_(table, non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(table.device))
        self._tables.append((here, event))

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks at fault for an earlier refused step, once; else an empty list.

        It looks at steps that are `LAG` steps old, or at ``everything`` so far.
        """
        while len(self._tables) >= (1 if everything else LAG):
            table, event = self._tables.popleft()
            if event is not None:
                event.synchronize()
            self._free.setdefault(len(table), []).append((table, event))
            votes = enumerate(table.tolist())
            if refused := [r for r, vote in votes if vote[Field.WRITTEN] > vote[Field.FINITE]]:
                return refused
        return []


def _buffer_for(table: Tensor) -> tuple[Tensor, Any]:
    """Return host memory for a table, and the event after which the table is there."""
    if not table.is_cuda:
        return torch.empty_like(table), None
    return torch.empty(table.shape, dtype=table.dtype, pin_memory=True), torch.cuda.Event()
