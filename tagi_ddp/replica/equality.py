"""Comparisons of the replicas of one model."""

from __future__ import annotations

import hashlib
from typing import Any

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.equality import RanksDiffer, all_or_none, first_difference
from tagi_ddp.replica import Replica


class ReplicaMismatch(RanksDiffer, RuntimeError):
    """Replicas that should be equal are not; the text names the first layer that differs."""


_REMEDY = "Build the same model on all ranks."


def check_structure(communicator: Communicator, replica: Replica, options: dict[str, Any]) -> None:
    """Raise ReplicaMismatch, on all ranks, unless all have the same layers and options."""
    _require_equal(communicator, _structure(replica, options))


def refuse_others(
    communicator: Communicator,
    replica: Replica,
    options: dict[str, Any],
    knows: bool,
    source: int,
) -> list[int]:
    """Return the new ranks of a group whose layers or options differ from those of ``source``.

    A collective call. Such a rank raises ReplicaMismatch, and the others go on without it. A rank
    that ``knows`` the state of the job is not new; if none does, this is `check_structure`.
    """
    own = list(_structure(replica, options).items())
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    everyone = all_gather_object(communicator, [digest, knows])
    if not any(known for _, known in everyone):
        check_structure(communicator, replica, options)
        return []
    others = [rank for rank, (each, _) in enumerate(everyone) if each != everyone[source][0]]
    if others:
        expected = all_gather_object(communicator, own if communicator.rank == source else [])
        if communicator.rank in others:
            difference = first_difference([tuple(each) for each in expected[source]], own)
            raise ReplicaMismatch(
                f"this network is not the one that the job trains: it differs first at "
                f"{difference}. {_REMEDY}"
            )
    return others


def _structure(replica: Replica, options: dict[str, Any]) -> dict[str, str]:
    own = {layer.name: layer.kind for layer in replica.layers}
    for name, array in replica.state():
        own[name] += f" {array.size}"
    layers = {f"layer {name}": kind for name, kind in own.items()}
    settings = {f"the option {name}": str(value) for name, value in options.items()}
    return {**layers, **settings}


def check_state(communicator: Communicator, replica: Replica) -> str:
    """Return a hash of the whole state; raise ReplicaMismatch, on all ranks, if it differs."""
    layers: dict[str, hashlib._Hash] = {}
    for name, array in replica.state():
        layers.setdefault(name, hashlib.sha256()).update(array.data)
    own = {f"layer {name}": digest.hexdigest() for name, digest in layers.items()}
    _require_equal(communicator, own)
    return hashlib.sha256("".join(own.values()).encode()).hexdigest()


def _require_equal(communicator: Communicator, own: dict[str, str]) -> None:
    """Compare the ranks' values for each layer, the layers in order."""
    with all_or_none(communicator, "replicas", _REMEDY, ReplicaMismatch) as same:
        for name, value in own.items():
            same(name, value)
