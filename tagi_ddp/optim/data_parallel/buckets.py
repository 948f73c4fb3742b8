"""Buckets of gradients, averaged over the ranks while backward runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tagi_ddp.communicators import Communicator
from tagi_ddp.optim.chunks import Flat, Reduction, as_real, start_reduction

_ELEMENTS = 2**20  # The size of a bucket: small enough that it is full before backward ends.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # By the bytes of an element.


class Bucket:
    """Parameters of one dtype whose gradients are reduced together, on ``device``."""

    def __init__(self, params: list[Tensor], device: torch.device) -> None:
        """Begin without gradients."""
        self.params = params
        self.dtype = params[0].dtype
        self._flat = Flat(params, self.dtype, device)
        self._local = self._mean = torch.empty(0)
        self._reduction: Reduction | None = None

    def load(self) -> None:
        """Copy the present gradients; a missing one counts as zero."""
        self._local = self._gradients()

    def reload(self) -> Tensor:
        """Load again; return a flag that is true if a bit has changed."""
        before, self._local = self._local, self._gradients()
        return (_bits(before) != _bits(self._local)).any()

    def start(self, communicator: Communicator, keep: bool) -> None:
        """Start to reduce the loaded gradients; ``keep`` a copy of them for another start."""
        self._mean = self._local.clone() if keep else self._local
        self._reduction = start_reduction([self._mean], communicator, limit=self._mean.numel())

    def means(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Wait, and return the parameters and the means of their gradients."""
        if self._reduction is not None:
            self._reduction.wait()
        return self._flat.parts(self._mean)

    def _gradients(self) -> Tensor:
        vector = self._flat.empty()
        for param, part in self._flat.parts(vector):
            if param.grad is None:
                part.zero_()
            elif param.grad.layout != torch.strided:
                raise TypeError(
                    f"a gradient of the shape {tuple(param.shape)} has the layout "
                    f"{param.grad.layout}: make it dense, or give DataParallel(..., blocking=True)"
                )
            else:
                part.copy_(param.grad)
        return vector


def _bits(vector: Tensor) -> Tensor:
    """Return the bits of floats as integers: those of a NaN equal themselves."""
    real = as_real(vector)
    return real.view(_INTEGERS[real.element_size()])


def make_buckets(params: Iterable[Tensor], device: torch.device) -> list[Bucket]:
    """Return ``params`` in buckets, the last ones first, which is the order of backward."""
    groups: list[list[Tensor]] = []
    filling: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for param in reversed([param for param in params if param.numel()]):
        kind, size = param.dtype, param.numel()
        sizes[kind] = sizes.get(kind, 0) + size
        if kind not in filling or sizes[kind] > _ELEMENTS:
            filling[kind], sizes[kind] = [], size
            groups.append(filling[kind])
        filling[kind].append(param)
    return [Bucket(group, device) for group in groups]


class Round:
    """The gradients of one step, from the first backward to `finish`.

    A bucket is reduced as soon as its gradients and all buckets before it are ready. The time and
    the set of gradients may differ between ranks, but not the order of the buckets.
    """

    def __init__(self, params: Iterable[Tensor], communicator: Communicator, early: bool) -> None:
        """Begin with these parameters; without ``early`` `finish` starts all reductions."""
        self._communicator = communicator
        self._device = torch.device(communicator.device)
        self.buckets = make_buckets(params, self._device)
        self.early = early
        self._missing = [set(bucket.params) for bucket in self.buckets]
        self._number = {p: n for n, bucket in enumerate(self.buckets) for p in bucket.params}
        self._started = 0

    def ready(self, param: Tensor) -> None:
        """Record that backward has written a gradient; reduce the buckets that are complete."""
        number = self._number.get(param)
        if number is None:
            return
        self._missing[number].discard(param)
        while self.early and self._started < len(self.buckets):
            if self._missing[self._started]:
                return
            self._start_next()

    def finish(self, params: Iterable[Tensor]) -> Tensor:
        """Reduce the remaining buckets, and new ones of those ``params`` that are in none.

        Returns a flag that is true if gradients have changed since their reduction began: by
        another backward, by clipping, or by `zero_grad` without a step.
        """
        self.buckets += make_buckets((p for p in params if p not in self._number), self._device)
        changes = [bucket.reload() for bucket in self.buckets[: self._started]]
        while self._started < len(self.buckets):
            self._start_next()
        return torch.stack(changes).any() if changes else torch.zeros((), dtype=torch.bool)

    def cast(self) -> bool:
        """Return whether parameters have another dtype than at first."""
        return any(p.dtype != bucket.dtype for bucket in self.buckets for p in bucket.params)

    def again(self) -> None:
        """Reduce all buckets again, after the gradients of a rank have changed."""
        for bucket in self.buckets:
            bucket.start(self._communicator, keep=False)

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        bucket.load()
        bucket.start(self._communicator, keep=self.early)
        self._started += 1
