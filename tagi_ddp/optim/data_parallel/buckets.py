"""Gradients on their way to the mean over the ranks, while backward goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator
from tagi_ddp.optim.chunks import Reduction, start_reduction

_ELEMENTS = 2**20  # of a bucket: few enough that backward is not over when it is full


class Bucket:
    """Parameters of one dtype, whose gradients travel together."""

    def __init__(self) -> None:
        """Begin without parameters."""
        self.params: list[Tensor] = []
        self.count = 0  # of elements
        self._local = torch.empty(0)
        self._mean = self._local
        self._reduction: Reduction | None = None

    def load(self, communicator: Communicator) -> None:
        """Take over the gradients as they are now; one that is missing counts as zero."""
        self._local = torch.empty(
            self.count, dtype=self.params[0].dtype, device=communicator.device
        )
        for param, part in self._parts(self._local):
            if param.grad is None:
                part.zero_()
            elif param.grad.layout != torch.strided:
                raise TypeError(f"gradients must be dense, got one of layout {param.grad.layout}")
            else:
                part.copy_(param.grad)

    def start(self, communicator: Communicator, keep: bool) -> None:
        """Begin to reduce what was loaded; ``keep`` it too, so that this can be done again."""
        self._mean = self._local.clone() if keep else self._local
        self._reduction = start_reduction([self._mean], communicator, limit=self.count)

    def means(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return parameters and the means of their gradients, when these are there."""
        if self._reduction is not None:
            self._reduction.wait()
        return self._parts(self._mean)

    def _parts(self, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        parts = flat.split([param.numel() for param in self.params])
        shaped = (part.view(p.shape) for p, part in zip(self.params, parts, strict=True))
        return zip(self.params, shaped, strict=True)


def make_buckets(params: Iterable[Tensor]) -> list[Bucket]:
    """Return ``params`` in buckets, the last ones first, as backward comes to them."""
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, Bucket] = {}
    for param in reversed([param for param in params if param.numel()]):
        bucket = filling.get(param.dtype)
        if bucket is None or bucket.count + param.numel() > _ELEMENTS:
            bucket = filling[param.dtype] = Bucket()
            buckets.append(bucket)
        bucket.params.append(param)
        bucket.count += param.numel()
    return buckets


class Round:
    """The gradients of one step, from the first backward to `finish`.

    A bucket is reduced as soon as its gradients and all buckets before it are ready. Ranks may
    differ in when that is, and in which gradients there are; never in the order of the buckets.
    """

    def __init__(self, params: Iterable[Tensor], communicator: Communicator, early: bool) -> None:
        """Begin for these parameters; unless ``early``, nothing is reduced before `finish`."""
        self.buckets = make_buckets(params)
        self.early = early
        self._communicator = communicator
        self._missing = [set(bucket.params) for bucket in self.buckets]
        self._place = {p: n for n, bucket in enumerate(self.buckets) for p in bucket.params}
        self._started = 0
        self._seen: dict[Tensor, tuple[Tensor | None, int]] = {}  # gradients and versions

    def ready(self, param: Tensor) -> None:
        """Take note that backward has left a gradient; reduce what is complete."""
        number = self._place.get(param)
        if number is None:
            return
        self._seen.setdefault(param, (param.grad, _version(param.grad)))
        self._missing[number].discard(param)
        while self.early and self._started < len(self.buckets):
            if self._missing[self._started]:
                return
            self._start_next()

    def finish(self, params: Iterable[Tensor]) -> bool:
        """Reduce what is left, ``params`` that were not known before too; return `changed`."""
        self.buckets += make_buckets(p for p in params if p not in self._place)
        changed = self.changed()
        started = self._started
        while self._started < len(self.buckets):
            self._start_next()
        if changed:
            for bucket in self.buckets[:started]:
                bucket.load(self._communicator)
        return changed

    def changed(self) -> bool:
        """Tell whether a gradient is no longer what backward first left.

        More backward calls do that, clipping, or `zero_grad` without a step.
        """
        return any(
            grad is not param.grad or version != _version(param.grad)
            for param, (grad, version) in self._seen.items()
        )

    def again(self) -> None:
        """Reduce once more, as some rank's gradients have changed."""
        for bucket in self.buckets:
            bucket.start(self._communicator, keep=False)

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        bucket.load(self._communicator)
        bucket.start(self._communicator, keep=self.early)
        self._started += 1


def _version(grad: Tensor | None) -> int:
    """Return the number of changes made to a gradient in place."""
    return -1 if grad is None else grad._version
