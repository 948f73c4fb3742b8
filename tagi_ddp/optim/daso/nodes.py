"""The upper level of DASO: nodes exchange their changes from a common base.

All ranks hold the same base B, the mean of all nodes at the last exchange. The ranks of one global
group send the change x - B of their nodes, for which few bits are enough, and all ranks add the
mean change to B. See `CompressedMean` for the errors of casting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.communicators.levels import Levels
from tagi_ddp.optim.chunks import Flat, broadcast_in_place
from tagi_ddp.optim.daso.compressed_mean import CompressedMean, Residual, no_residual
from tagi_ddp.optim.daso.finite import NotFinite, all_finite


@dataclass
class Completed:
    """A mean that is complete from the beginning, as after `Nodes.load_state_dict`."""

    mean: Tensor
    residual: Residual | None

    def progress(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing: the mean is complete."""


@dataclass
class InFlight:
    """The means that a global group has in flight; ``means`` is empty on ranks of others."""

    group: int
    means: Sequence[CompressedMean | Completed] = ()


@dataclass
class _Vector:
    """Tensors of one precision, and their base; ``cast`` is the dtype that is sent."""

    flat: Flat
    base: Tensor
    cast: torch.dtype
    residual: Residual | None  # None: nothing is cast.

    def change(self) -> Tensor:
        """Return the change of the tensors from the base."""
        now = self.flat.read()
        return torch.where(now == self.base, 0.0, now - self.base)  # Masks may hold infinities.

    def mix(self, part: float) -> None:
        """Set the tensors to ``part`` of their values plus 1 - ``part`` of the base."""
        now, base = self.flat.read(), self.base
        self.flat.write(torch.where(now == base, base, torch.lerp(base, now, part)))


class Nodes:
    """Parameters and buffers that nodes exchange; all ranks call every method alike.

    Args:
        levels: the communicators. The ranks of a node hold equal tensors when a method is called.
        floats: tensors that are averaged over nodes. All ranks hold the same now.
        integers: tensors that become those of node 0.
        cast: the dtype in which tensors of float32 or less are sent.
        limit: the largest number of elements of one operation.
        weight: the weight of a node's own tensors for each batch since copies were sent; see
            `merge`.
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
        """Take the tensors' values as the base."""
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
        """Send the nodes' changes, if this rank is of the global group; no rank waits."""
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
        """The indices, among all sent elements, at which operations but the first begin."""
        starts: list[int] = []
        begin = 0
        for vector in self._vectors:
            starts += range(begin, begin + vector.base.numel(), self._limit)
            begin += vector.base.numel()
        return starts[1:]

    @property
    def busy(self) -> bool:
        """True if this rank has sent changes that are not merged."""
        return len(self._sent) > 0

    @property
    def _sent(self) -> Sequence[CompressedMean | Completed]:
        return self._in_flight.means if self._in_flight else ()

    def progress(self) -> None:
        """Advance the exchange in flight, without waiting."""
        for mean in self._sent:
            mean.progress()

    def merge(self, waited: int) -> None:
        """Merge the copies that were sent ``waited`` batches ago into the tensors.

        With P nodes and the weight w, x = (w S x + sum of the P copies) / (w S + P), S = waited.
        Does nothing if nothing is in flight, as after `DASO.set_model`.
        """
        if self._in_flight is None:
            return
        own = self._weight * waited
        part = own / (own + self._levels.nodes)
        self._receive(self._in_flight, part)
        for vector in self._vectors:
            vector.mix(part)

    def average(self) -> None:
        """Set the tensors to the mean over all nodes; all ranks wait."""
        self.send(0)
        assert self._in_flight is not None
        self._receive(self._in_flight, 0.0)
        for vector in self._vectors:
            vector.flat.write(vector.base)
        if self._levels.node.rank == 0:
            broadcast_in_place(self._integers, self._levels.inter_node, 0, self._limit)
        broadcast_in_place(self._integers, self._levels.node, 0, self._limit)

    def _receive(self, sent: InFlight, part: float) -> None:
        """Wait, and add the mean change to the base; ``part`` of the residual remains."""
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
                "the nodes sent NaN or infinite numbers; no rank has applied them. Look at the "
                "loss and the learning rate of the last batches on all ranks"
                + (", or give downcast_type=torch.bfloat16" if half else "")
            )
        for vector, mean in zip(vectors, means, strict=True):
            vector.base.add_(mean.to(vector.base.device))
        for vector, own in zip(vectors, sent.means, strict=False):
            if vector.residual is not None and own.residual is not None:
                vector.residual = vector.residual.mixed(own.residual, part)
        self._in_flight = None

    def wait(self) -> None:
        """Wait for the exchange in flight, but do not merge it."""
        for mean in self._sent:
            mean.finish()

    def drop(self) -> None:
        """Wait for the exchange in flight, and discard it."""
        self.wait()
        self._in_flight = None

    def state_dict(self) -> dict[str, Any]:
        """Wait, as `wait` does; return the state, in new tensors."""
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
        """Restore a state that has passed `check`."""
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
    """Return the tensors as vectors, by device: those of float64, and others as float32."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            groups.setdefault((wide, tensor.device), []).append(tensor)
    return [Flat(group, *kind) for kind, group in groups.items()]


def _sizes(
    bases: list[Tensor], residuals: list[tuple[Tensor, Tensor] | None]
) -> list[tuple[str, int, list[int]]]:
    """Return the dtypes and sizes that a state must have in common with this object."""
    return [
        (str(base.dtype), base.numel(), [part.numel() for part in parts or ()])
        for base, parts in zip(bases, residuals, strict=True)
    ]


def _saved(residual: Residual | None) -> tuple[Tensor, Tensor] | None:
    return None if residual is None else (residual.own.clone(), residual.share.clone())


def _loaded(saved: tuple[Tensor, Tensor] | None, device: torch.device) -> Residual | None:
    return None if saved is None else Residual(*(part.to(device, copy=True) for part in saved))
