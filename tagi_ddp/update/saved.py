"""The posterior of ranks that have ended, from their states between two merges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from tagi_ddp._backend import AdaptiveSum, Parameters
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.update.consensus import remember


def merge_saved(
    parameters: Parameters, posteriors: Sequence[FloatArray], states: Sequence[dict[str, Any]]
) -> FloatArray:
    """Return the posterior that the next merge of all ranks would have reached.

    It differs by rounding, and by what a compressed sum had not sent yet.

    Args:
        parameters: of the same network.
        posteriors: of each rank, in rank order: Gaussians, [means | variances].
        states: what `Merging.state_dict` returned on each rank.
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
        _merged(
            parameters, [posterior for posterior, _ in node], [state["node"] for _, state in node]
        )
        for node in nodes
    ]
    if len(nodes) == 1:
        return merged[0]
    levels = [state["nodes"] for _, state in nodes[0]]
    arrived = next((level["sum"] for level in levels if level["sum"] is not None), None)
    firsts = [node[0][1]["nodes"] for node in nodes]
    in_flight = None if arrived is None else (arrived, [level["sent"] for level in firsts])
    return _merged(parameters, merged, [level["common"] for level in firsts], in_flight)


def _merged(
    parameters: Parameters,
    posteriors: Sequence[FloatArray],
    states: Sequence[dict[str, Any]],
    in_flight: tuple[FloatArray, Sequence[FloatArray]] | None = None,
) -> FloatArray:
    """Merge the posteriors of a group; ``states`` are those of its consensus, on each rank.

    A sum ``in_flight``, with the changes that were sent for it, is merged before: each change is in
    its own node's posterior, and not yet in the common one.
    """
    if len(posteriors) == 1:
        return posteriors[0]
    size = parameters.size
    common = np.array(states[0]["gaussians"], np.float32)
    change, total = (np.zeros(2 * size, np.float32) for _ in range(2))
    damping = None
    if states[0]["damping"] is not None:
        damping = AdaptiveSum(parameters)
        remember(damping, states[0]["damping"])
    described = damping.described if damping else 0
    description, descriptions = (np.zeros(described, np.float32) for _ in range(2))
    if in_flight is not None:
        arrived, sent = in_flight
        total[:], descriptions[:] = arrived[: 2 * size], arrived[2 * size :]
        if damping:
            damping.damp(total, common, descriptions, len(posteriors))
        for posterior, own in zip(posteriors, sent, strict=True):
            parameters.add_change(posterior, common, total, own)
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
