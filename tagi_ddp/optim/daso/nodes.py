"""The upper level of DASO: nodes exchange how far they are from what all have in common.

All ranks hold the same base B, what the nodes had in common after the last exchange. The ranks of
one global group send how far their node's x is from B, so that few bits are enough, and all ranks
add the mean of that to B. See `CompressedMean` for what casting drops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagi_ddp.communicators.hierarchy import Hierarchy
from tagi_ddp.optim.chunks import broadcast_in_place
from tagi_ddp.optim.daso.compressed_mean import CompressedMean, Lost, nothing_lost
from tagi_ddp.optim.daso.finite import NotFinite, all_finite
from tagi_ddp.optim.flat import Flat


@dataclass
class Arrived:
    """A mean that is there already, as after `Nodes.load_state_dict`."""

    mean: Tensor
    lost: Lost | None

    def progress(self) -> None:
        """There is nothing to do."""

    def finish(self) -> None:
        """There is nothing to wait for."""


@dataclass
class Flight:
    """What a global group has sent; ``means`` are empty on the ranks of other groups."""

    group: int
    means: list[CompressedMean | Arrived]


class Nodes:
    """Parameters and buffers of nodes, kept in step; every method is called by all ranks alike.

    Args:
        levels: the communicators; the ranks of a node hold equal tensors when a method is called.
        floats: tensors that are averaged over nodes. All ranks have the same now.
        integers: tensors that node 0 gives to the others.
        cast: what is sent of tensors of float32 or less.
        limit: the largest number of elements of one operation.
        weight: a local copy counts as so many copies of others for each batch since they were sent.
    """

    def __init__(
        self,
        levels: Hierarchy,
        floats: Iterable[Tensor],
        integers: list[Tensor],
        cast: torch.dtype,
        limit: int,
        weight: float,
    ) -> None:
        """Take what the tensors hold as the base."""
        self._levels = levels
        self._vectors = _by_precision(floats)
        self._integers = integers
        self._limit = limit
        self._weight = weight
        self._base = [vector.read() for vector in self._vectors]
        self._casts = [base.dtype if base.dtype == torch.float64 else cast for base in self._base]
        self._lost = [
            None if sent == base.dtype else nothing_lost(base, levels.inter_node, limit)
            for base, sent in zip(self._base, self._casts, strict=True)
        ]
        self._flight: Flight | None = None

    def send(self, group: int) -> None:
        """Let a global group send what its nodes hold; nobody waits."""
        self._flight = Flight(group, [])
        if self._levels.node.rank != group:
            return
        for vector, base, lost, cast in zip(
            self._vectors, self._base, self._lost, self._casts, strict=True
        ):
            now = vector.read()
            change = torch.where(now == base, 0.0, now - base)  # masks may hold infinities
            mean = CompressedMean(change, lost, self._levels.inter_node, cast, self._limit)
            self._flight.means.append(mean)

    @property
    def busy(self) -> bool:
        """Whether this rank has sent something that is not merged."""
        return self._flight is not None and len(self._flight.means) > 0

    def progress(self) -> None:
        """Do what can be done for what is under way, without waiting."""
        for mean in self._flight.means if self._flight else ():
            mean.progress()

    def merge(self, waited: int) -> None:
        """Mix what was sent ``waited`` batches ago into what the nodes hold now.

        Nothing is under way after `set_model`; then there is nothing to do.

        With P nodes and the weight w, x = (w S x + sum of the P copies) / (w S + P), S = waited.
        """
        if self._flight is None:
            return
        own = self._weight * waited
        part = own / (own + self._levels.nodes)
        common = self._take(part)
        for vector, base in zip(self._vectors, common, strict=True):
            now = vector.read()
            vector.write(torch.where(now == base, base, torch.lerp(base, now, part)))

    def average(self) -> None:
        """Let all nodes hold the mean of them all; everyone waits."""
        self.send(0)
        for vector, base in zip(self._vectors, self._take(0.0), strict=True):
            vector.write(base)
        if self._levels.node.rank == 0:
            broadcast_in_place(self._integers, self._levels.inter_node, 0, self._limit)
        broadcast_in_place(self._integers, self._levels.node, 0, self._limit)

    def _take(self, part: float) -> list[Tensor]:
        """Receive what is under way, and return the new base; ``part`` of what was lost remains."""
        flight = self._flight
        assert flight is not None
        self._wait()
        node = self._levels.node
        if flight.means:
            means = [mean.mean for mean in flight.means]
        else:
            means = [
                torch.empty(base.shape, dtype=cast, device=node.device)
                for base, cast in zip(self._base, self._casts, strict=True)
            ]
        broadcast_in_place(means, node, flight.group, self._limit)
        if not all_finite(means):
            raise NotFinite(
                "what the nodes sent is NaN or infinite; no rank has applied it. Look at the loss "
                "and the learning rate of the last batches on all ranks"
                + (", or give downcast_type=torch.bfloat16" if torch.half in self._casts else "")
            )
        for base, mean in zip(self._base, means, strict=True):
            base.add_(mean.to(base.device))
        for index, mean in enumerate(flight.means):
            old = self._lost[index]
            if old is not None and mean.lost is not None:
                self._lost[index] = old.mixed(mean.lost, part)
        self._flight = None
        return self._base

    def _wait(self) -> None:
        for mean in self._flight.means if self._flight else ():
            mean.finish()

    def drop(self) -> None:
        """Wait for what is under way, and forget it."""
        self._wait()
        self._flight = None

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way, but do not merge it; return everything as new tensors."""
        self._wait()
        flight = None
        if self._flight is not None:
            means = [(mean.mean.clone(), _saved(mean.lost)) for mean in self._flight.means]
            flight = {"group": self._flight.group, "means": means}
        return {
            "base": [base.clone() for base in self._base],
            "lost": [_saved(lost) for lost in self._lost],
            "flight": flight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called.

        Raises ValueError if ``state`` is of other tensors, or of another ``cast``.
        """
        saved = _sizes(state["base"], state["lost"])
        here = _sizes(self._base, [_saved(lost) for lost in self._lost])
        if saved != here:
            raise ValueError(
                f"state has vectors of {saved} elements, this DASO of {here}: give the same model, "
                "downcast_type, sending_chunk_size and ranks"
            )
        devices = [base.device for base in self._base]
        self.drop()
        for base, other in zip(self._base, state["base"], strict=True):
            base.copy_(other)
        self._lost = [
            _loaded(lost, device) for lost, device in zip(state["lost"], devices, strict=True)
        ]
        if (flight := state["flight"]) is not None:
            wire = torch.device(self._levels.inter_node.device)
            arrived = [
                Arrived(mean.to(wire, copy=True), _loaded(lost, device))
                for (mean, lost), device in zip(flight["means"], devices, strict=False)
            ]
            self._flight = Flight(flight["group"], arrived)


def _by_precision(tensors: Iterable[Tensor]) -> list[Flat]:
    """Return them as vectors of float64, where they are, and of float32."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            groups.setdefault((wide, tensor.device), []).append(tensor)
    return [Flat(group, *kind) for kind, group in groups.items()]


def _sizes(
    bases: list[Tensor], lost: list[tuple[Tensor, Tensor] | None]
) -> list[tuple[str, int, list[int]]]:
    """Return what must be the same to go on from a state."""
    return [
        (str(base.dtype), base.numel(), [part.numel() for part in parts or ()])
        for base, parts in zip(bases, lost, strict=True)
    ]


def _saved(lost: Lost | None) -> tuple[Tensor, Tensor] | None:
    return None if lost is None else (lost.own.clone(), lost.share.clone())


def _loaded(saved: tuple[Tensor, Tensor] | None, device: torch.device) -> Lost | None:
    return None if saved is None else Lost(*(part.to(device, copy=True) for part in saved))
