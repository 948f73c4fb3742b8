"""The posterior of ranks that are no more, from what they have saved between two merges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from numpy.typing import NDArray

from tagi_ddp.communicators import Buffer
from tagi_ddp.replica.protocol import Replica
from tagi_ddp.replica.staging import fill
from tagi_ddp.update.consensus import remember


def merge_saved(
    replica: Replica, posteriors: Sequence[Buffer], states: Sequence[dict[str, Any]]
) -> Buffer:
    """Return what all ranks knew together: what their next merge would have made of it.

    Up to rounding, and but for what a compressed sum had not sent yet.

    Args:
        replica: of the same network.
        posteriors: of each rank, in rank order: Gaussians, [means | variances].
        states: what `Merging.state_dict` returned on each.
    """
    ranks = zip(posteriors, states, strict=True)
    nodes = [
        list(members)
        for _, members in groupby(
            sorted(ranks, key=lambda rank: rank[1]["node_number"]),
            key=lambda rank: rank[1]["node_number"],
        )
    ]
    merged = [
        _merged(replica, [posterior for posterior, _ in node], [state["node"] for _, state in node])
        for node in nodes
    ]
    if len(nodes) == 1:
        return merged[0]
    levels = [state["nodes"] for _, state in nodes[0]]
    arrived = next((level["sum"] for level in levels if level["sum"] is not None), None)
    firsts = [node[0][1]["nodes"] for node in nodes]
    in_flight = None if arrived is None else (arrived, [level["sent"] for level in firsts])
    return _merged(replica, merged, [level["common"] for level in firsts], in_flight)


def _merged(
    replica: Replica,
    posteriors: Sequence[Buffer],
    states: Sequence[dict[str, Any]],
    in_flight: tuple[NDArray[Any], Sequence[NDArray[Any]]] | None = None,
) -> Buffer:
    """Merge the posteriors of a group; ``states`` of its consensus, on each rank.

    A sum that was ``in_flight``, with the changes that were sent for it, is taken in before: each
    change is in its own node's posterior, and not yet in the common one.
    """
    if len(posteriors) == 1:
        return posteriors[0]
    parameters = replica.parameters
    common, change, total = (replica.zeros() for _ in range(3))
    fill(common, states[0]["gaussians"])
    damping = None
    if states[0]["damping"] is not None:
        damping = replica.adaptive_sum()
        remember(damping, states[0]["damping"])
    described = damping.described if damping else 0
    description, descriptions = replica.zeros()[:described], replica.zeros()[:described]
    if in_flight is not None:
        arrived, sent = in_flight
        fill(total, arrived[: len(total)])
        fill(descriptions, arrived[len(total) :])
        if damping:
            damping.damp(total, common, descriptions, len(posteriors))
        for posterior, own in zip(posteriors, sent, strict=True):
            fill(change, own)
            parameters.add_change(posterior, common, total, change)
        parameters.add_change(common, common, total)
        total[:] = descriptions[:] = 0
    for posterior, state in zip(posteriors, states, strict=True):
        parameters.change_since(posterior, common, change)
        total += change
        if damping:
            damping.describe(change, common, state["steps"], description)
            descriptions += description
    if damping:
        damping.damp(total, common, descriptions, len(posteriors))
    parameters.add_change(common, common, total)
    return common
