"""Tensors that have changed since all ranks held the same, and votes of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator
from tagi_ddp.optim.chunks import start_reduction


class Changes:
    """A record of which tensors have changed since all ranks held the same.

    Only these are averaged: the mean of equal numbers may differ from them by rounding.

    Args:
        tensors: returns the tensors in a fixed order, equal on all ranks now. A tensor that it
            returns later counts as changed if it differs from the recorded one at its position.
    """

    def __init__(self, tensors: Callable[[], list[Tensor]]) -> None:
        """Record the present values."""
        self.tensors = tensors
        self.last: list[Tensor] = []
        self.note(repeat(True))

    def flags(self) -> list[Tensor]:
        """Return whether each tensor has changed on this rank, as tensors: no host waits."""
        pairs = zip(self.tensors(), chain(self.last, repeat(None)), strict=False)
        return [
            torch.ones((), dtype=torch.bool)
            if last is None or last.shape != tensor.shape
            else (last.to(tensor.device) != tensor).any()
            for tensor, last in pairs
        ]

    def note(self, flags: Iterable[int | bool]) -> None:
        """Record the tensors whose flags are true: all ranks hold the same in them now."""
        pairs = zip(self.tensors(), flags, chain(self.last, repeat(None)), strict=False)
        self.last = [
            tensor.detach().clone() if flag or last is None else last
            for tensor, flag, last in pairs
        ]


class Vote:
    """A vote on small numbers and flags: all ranks get the greatest of each over the ranks."""

    def __init__(
        self, numbers: Sequence[int], flags: Iterable[Tensor], communicator: Communicator
    ) -> None:
        """Start to vote on ``numbers``, 0 to 255, and one-element ``flags``, without waiting."""
        device = torch.device(communicator.device)
        parts = [torch.tensor(numbers, dtype=torch.uint8, device=device)]
        parts += [flag.to(device, torch.uint8).view(1) for flag in flags]
        self._ballot = torch.cat(parts)
        self._reduction = start_reduction([self._ballot], communicator, "max")

    def result(self) -> list[int]:
        """Wait, and return the greatest numbers and flags, in their order."""
        self._reduction.wait()
        result: list[int] = self._ballot.tolist()
        return result
