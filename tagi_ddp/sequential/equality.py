"""Replicas of one model: whether they are equal, making them so, and their share of the cores."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Any

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.environment import detect
from tagi_ddp.replica.protocol import Replica


class ReplicaMismatch(RuntimeError):
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
        layers.setdefault(name, hashlib.sha256()).update(array)
    own = {name: digest.hexdigest() for name, digest in layers.items()}
    _require_equal(communicator, own)
    return hashlib.sha256("".join(own.values()).encode()).hexdigest()


def share_of_cores(communicator: Communicator) -> int:
    """Return how many threads this rank may run: its part of the cores that it may use, at least 1.

    A core that several ranks of this host may use counts for each of them in part, so ranks that
    the launcher has bound to cores get those, and unbound ones cores / ranks, the launcher's ranks
    that are in other groups included.
    """
    host, cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
    everyone = all_gather_object(communicator, (host, cores))
    here = [others for name, others in everyone if name == host]
    share = sum(1 / sum(core in others for others in here) for core in cores)
    if len(cores) == os.cpu_count():  # not bound
        share *= len(here) / max(len(here), detect().local_world_size)
    return max(1, int(share + 1e-9))


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
