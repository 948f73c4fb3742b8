"""The upper level of DASO: nodes exchange how far they are from what all have in common.

All ranks hold the same base B, what the nodes had in common after the last exchange. The ranks of
one global group send how far their node's x is from B, so that few bits are enough, and all ranks
add the mean of that to B. See `CompressedMean` for what casting drops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.communicators.levels import Levels
from tagi_ddp.optim.chunks import broadcast_in_place
from tagi_ddp.optim.daso.compressed_mean import CompressedMean, Residual, no_residual
from tagi_ddp.optim.daso.finite import NotFinite, all_finite
from tagi_ddp.optim.flat import Flat


@dataclass
class Completed:
    """A mean that is there already, as after `Nodes.load_state_dict`."""

    mean: Tensor
    residual: Residual | None

    def progress(self) -> None:
        """There is nothing to do."""

    def finish(self) -> None:
        """There is nothing to wait for."""


@dataclass
class InFlight:
    """What a global group has sent; ``means`` are empty on the ranks of other groups."""

    group: int
    means: Sequence[CompressedMean | Completed] = ()


@dataclass
class _Vector:
    """Tensors of one precision, and what all nodes have in common of them."""

    flat: Flat
    base: Tensor
    cast: torch.dtype  # of what is sent
    residual: Residual | None  # None: nothing is cast

    def change(self) -> Tensor:
        """Return how far the tensors are from the base."""
        now = self.flat.read()
        return torch.where(now == self.base, 0.0, now - self.base)  # masks may hold infinities

    def mix(self, part: float) -> None:
        """Let the tensors hold ``part`` of what they hold, the rest of the base."""
        now, base = self.flat.read(), self.base
        self.flat.write(torch.where(now == base, base, torch.lerp(base, now, part)))


class Nodes:
    """Parameters and buffers of nodes, kept in step; every method is called by all ranks alike.

    Args:
        levels: of communicators; the ranks of a node hold equal tensors when a method is called.
        floats: tensors that are averaged over nodes. All ranks have the same now.
        integers: tensors that node 0 gives to the others.
        cast: what is sent of tensors of float32 or less.
        limit: the largest number of elements of one operation.
        weight: a local copy counts as so many copies of others for each batch since they were sent.
    """

    def __init__(
        self,
        levels: Levels,
        floats: Iterable[Tensor],
        integers: list[Tensor],
        cast: torch.dtype,
        limit: int,
        weight: float,
    ) -> None:
        """Take what the tensors hold as the base."""
        self._levels = levels
        self._integers = integers
        self._limit = limit
        self._weight = weight
        self._vectors = [self._vector(flat, cast) for flat in _by_precision(floats)]
        self._in_flight: InFlight | None = None

    def _vector(self, flat: Flat, cast: torch.dtype) -> _Vector:
        base = flat.read()
        if flat.dtype in (cast, torch.float64):
            return _Vector(flat, base, flat.dtype, None)
        return _Vector(flat, base, cast, no_residual(base, self._levels.inter_node, self._limit))

    def send(self, group: int) -> None:
        """Let a global group send what its nodes hold; no rank waits."""
        self._in_flight = InFlight(group)
        if self._levels.node.rank == group:
            self._in_flight.means = [
                CompressedMean(
                    vector.change(),
                    vector.residual,
                    self._levels.inter_node,
                    vector.cast,
                    self._limit,
                )
                for vector in self._vectors
            ]

    @property
    def splits(self) -> list[int]:
        """The first element of each operation but the first one, of all elements that are sent."""
        starts: list[int] = []
        begin = 0
        for vector in self._vectors:
            starts += range(begin, begin + vector.base.numel(), self._limit)
            begin += vector.base.numel()
        return starts[1:]

    @property
    def busy(self) -> bool:
        """Whether this rank has sent something that is not merged."""
        return len(self._sent) > 0

    @property
    def _sent(self) -> Sequence[CompressedMean | Completed]:
        return self._in_flight.means if self._in_flight else ()

    def progress(self) -> None:
        """Do what can be done for what is in flight, without waiting."""
        for mean in self._sent:
            mean.progress()

    def merge(self, waited: int) -> None:
        """Mix what was sent ``waited`` batches ago into what the nodes hold now.

        Nothing is in flight after `set_model`; then there is nothing to do.

        With P nodes and the weight w, x = (w S x + sum of the P copies) / (w S + P), S = waited.
        """
        if self._in_flight is None:
            return
        own = self._weight * waited
        part = own / (own + self._levels.nodes)
        self._receive(self._in_flight, part)
        for vector in self._vectors:
            vector.mix(part)

    def average(self) -> None:
        """Let all nodes hold the mean of them all; all ranks wait."""
        self.send(0)
        assert self._in_flight is not None
        self._receive(self._in_flight, 0.0)
        for vector in self._vectors:
            vector.flat.write(vector.base)
        if self._levels.node.rank == 0:
            broadcast_in_place(self._integers, self._levels.inter_node, 0, self._limit)
        broadcast_in_place(self._integers, self._levels.node, 0, self._limit)

    def _receive(self, sent: InFlight, part: float) -> None:
        """Add what was sent to the base; ``part`` of the residual remains."""
        self.wait()
        node, vectors = self._levels.node, self._vectors
        means = [mean.mean for mean in sent.means] or [
            torch.empty(vector.base.shape, dtype=vector.cast, device=node.device)
            for vector in vectors
        ]
        broadcast_in_place(means, node, sent.group, self._limit)
        if not all_finite(means):
            half = any(vector.cast == torch.half for vector in vectors)
            raise NotFinite(
                "what the nodes sent is NaN or infinite; no rank has applied it. Look at the loss "
                "and the learning rate of the last batches on all ranks"
                + (", or give downcast_type=torch.bfloat16" if half else "")
            )
        for vector, mean in zip(vectors, means, strict=True):
            vector.base.add_(mean.to(vector.base.device))
        for vector, own in zip(vectors, sent.means, strict=False):
            if vector.residual is not None and own.residual is not None:
                vector.residual = vector.residual.mixed(own.residual, part)
        self._in_flight = None

    def wait(self) -> None:
        """Wait for what is in flight, but do not merge it."""
        for mean in self._sent:
            mean.finish()

    def drop(self) -> None:
        """Wait for what is in flight, and forget it."""
        self.wait()
        self._in_flight = None

    def state_dict(self) -> dict[str, Any]:
        """Wait, as `wait` does; return everything as new tensors."""
        self.wait()
        in_flight = None
        if self._in_flight is not None:
            means = [(mean.mean.clone(), _saved(mean.residual)) for mean in self._sent]
            in_flight = {"group": self._in_flight.group, "means": means}
        return {
            "base": [vector.base.clone() for vector in self._vectors],
            "residuals": [_saved(vector.residual) for vector in self._vectors],
            "in_flight": in_flight,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` is of other tensors, another ``cast`` or ``limit``."""
        saved = _sizes(state["base"], state["residuals"])
        here = _sizes(
            [vector.base for vector in self._vectors],
            [_saved(vector.residual) for vector in self._vectors],
        )
        if saved != here:
            raise ValueError(
                f"state has vectors of {saved} elements, this DASO of {here}: give the same model, "
                "downcast_type, sending_chunk_size and ranks"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called, by a state that has passed `check`."""
        self.drop()
        for vector, base, residual in zip(
            self._vectors, state["base"], state["residuals"], strict=True
        ):
            vector.base.copy_(base)
            vector.residual = _loaded(residual, vector.base.device)
        if (in_flight := state["in_flight"]) is not None:
            device = torch.device(self._levels.inter_node.device)
            means = [
                Completed(mean.to(device, copy=True), _loaded(residual, vector.base.device))
                for vector, (mean, residual) in zip(self._vectors, in_flight["means"], strict=False)
            ]
            self._in_flight = InFlight(in_flight["group"], means)


def _by_precision(tensors: Iterable[Tensor]) -> list[Flat]:
    """Return them as vectors of float64, where they are, and of float32."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            groups.setdefault((wide, tensor.device), []).append(tensor)
    return [Flat(group, *kind) for kind, group in groups.items()]


def _sizes(
    bases: list[Tensor], residuals: list[tuple[Tensor, Tensor] | None]
) -> list[tuple[str, int, list[int]]]:
    """Return what must be the same to go on from a state."""
    return [
        (str(base.dtype), base.numel(), [part.numel() for part in parts or ()])
        for base, parts in zip(bases, residuals, strict=True)
    ]


def _saved(residual: Residual | None) -> tuple[Tensor, Tensor] | None:
    return None if residual is None else (residual.own.clone(), residual.share.clone())


def _loaded(saved: tuple[Tensor, Tensor] | None, device: torch.device) -> Residual | None:
    return None if saved is None else Residual(*(part.to(device, copy=True) for part in saved))
