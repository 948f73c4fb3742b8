"""Which tensors have changed, and the vote of all ranks on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator
from tagi_ddp.optim.chunks import start_reduction


class Changes:
    """Notes which tensors have changed since all ranks held the same.

    Only these are averaged: the mean of equal numbers may differ from them by rounding.

    Args:
        tensors: returns them in their order, equal on all ranks now. When it returns others, or
            more, these count as changed where they differ from what was in their position.
    """

    def __init__(self, tensors: Callable[[], list[Tensor]]) -> None:
        """Note what they hold now."""
        self.tensors = tensors
        self.last: list[Tensor] = []
        self.note(repeat(True))

    def flags(self) -> list[Tensor]:
        """Return whether each has changed on this rank, as tensors, for no host to wait."""
        pairs = zip(self.tensors(), chain(self.last, repeat(None)), strict=False)
        return [
            torch.ones((), dtype=torch.bool)
            if last is None or last.shape != tensor.shape
            else (last.to(tensor.device) != tensor).any()
            for tensor, last in pairs
        ]

    def note(self, flags: Iterable[int | bool]) -> None:
        """Take note that all ranks hold the same now in those whose flags are true."""
        pairs = zip(self.tensors(), flags, chain(self.last, repeat(None)), strict=False)
        self.last = [
            tensor.detach().clone() if flag or last is None else last
            for tensor, flag, last in pairs
        ]


class Vote:
    """Small numbers of which all ranks get the greatest: of flags, whether any rank's is true."""

    def __init__(
        self, numbers: Sequence[int], flags: Iterable[Tensor], communicator: Communicator
    ) -> None:
        """Begin to vote on ``numbers``, 0 to 255, and single ``flags``, without waiting."""
        device = torch.device(communicator.device)
        parts = [torch.tensor(numbers, dtype=torch.uint8, device=device)]
        parts += [flag.to(device, torch.uint8).view(1) for flag in flags]
        self._ballot = torch.cat(parts)
        self._reduction = start_reduction([self._ballot], communicator, "max")

    def result(self) -> list[int]:
        """Wait, and return the numbers and flags in their order."""
        self._reduction.wait()
        result: list[int] = self._ballot.tolist()
        return result
