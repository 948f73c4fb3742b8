"""Whether the replicas of one model are equal."""

from __future__ import annotations

import hashlib
from typing import Any

from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.equality import RanksDiffer, require_equal
from tagi_ddp.replica.protocol import Replica


class ReplicaMismatch(RanksDiffer, RuntimeError):
    """Replicas that should be equal are not; the text names the first layer that differs."""


def check_structure(communicator: Communicator, replica: Replica, options: dict[str, Any]) -> None:
    """Raise ReplicaMismatch, on all ranks, unless all have the same layers and options."""
    own = {layer.name: layer.kind for layer in replica.layers}
    for name, array in replica.state():
        own[name] += f" {array.size}"
    layers = {f"layer {name}": kind for name, kind in own.items()}
    given = {f"the option {name}": str(value) for name, value in options.items()}
    _require_equal(communicator, {**layers, **given})


def check_state(communicator: Communicator, replica: Replica) -> str:
    """Return a hash of the whole state; raise ReplicaMismatch, on all ranks, where it differs."""
    layers: dict[str, hashlib._Hash] = {}
    for name, array in replica.state():
        layers.setdefault(name, hashlib.sha256()).update(array.data)
    own = {f"layer {name}": digest.hexdigest() for name, digest in layers.items()}
    _require_equal(communicator, own)
    return hashlib.sha256("".join(own.values()).encode()).hexdigest()


def _require_equal(communicator: Communicator, own: dict[str, str]) -> None:
    """Compare what the ranks say of each layer, the layers in order."""
    remedy = "Build the same model on all ranks."
    require_equal(communicator, own.items, "replicas", remedy, ReplicaMismatch)
