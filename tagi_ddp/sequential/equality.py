"""Whether the replicas of one model are equal."""

from __future__ import annotations

import hashlib
from typing import Any

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.replica.protocol import Replica


class ReplicaMismatch(AllRanksRaise, RuntimeError):
    """Replicas that should be equal are not; the text names the first layer that differs."""


def check_structure(communicator: Communicator, replica: Replica, options: dict[str, Any]) -> None:
    """Raise ReplicaMismatch, on all ranks, unless all have the same layers and options."""
    own = {layer.name: layer.kind for layer in replica.layers}
    for name, array in replica.state():
        own[name] += f" {array.size}"
    for option, value in options.items():
        own[f"(none, but the option {option})"] = str(value)
    _require_equal(communicator, own)


def check_state(communicator: Communicator, replica: Replica) -> str:
    """Return a hash of the whole state; raise ReplicaMismatch, on all ranks, where it differs."""
    layers: dict[str, hashlib._Hash] = {}
    for name, array in replica.state():
        layers.setdefault(name, hashlib.sha256()).update(array.data)
    own = {name: digest.hexdigest() for name, digest in layers.items()}
    _require_equal(communicator, own)
    return hashlib.sha256("".join(own.values()).encode()).hexdigest()


def _require_equal(communicator: Communicator, own: dict[str, str]) -> None:
    """Compare what the ranks say of each layer, the layers in order."""
    entries = list(own.items())
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()
    if len(set(all_gather_object(communicator, digest))) == 1:
        return
    first, *others = all_gather_object(communicator, entries)
    for rank, theirs in enumerate(others, start=1):
        for mine, other in zip(first, theirs, strict=False):
            if mine != other:
                raise ReplicaMismatch(
                    f"replicas differ first at layer {other[0]} of rank {rank}: {other[1]}; rank 0 "
                    f"has {mine[0]}: {mine[1]}. Build the same model on all ranks."
                )
        if len(theirs) != len(first):
            longer, shorter = sorted((first, theirs), key=len, reverse=True)
            raise ReplicaMismatch(
                f"replicas differ first at layer {longer[len(shorter)][0]}, which only one of rank "
                f"0 and rank {rank} has. Build the same model on all ranks."
            )
