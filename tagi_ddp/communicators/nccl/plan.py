"""What a call asks of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Plan:
    """What a call asks of NCCL.

    ``stream`` is the caller's; ``enqueue`` calls NCCL; ``after`` finishes the result, in the
    caller's stream; ``buffers`` are kept until then. ``messages`` is what a rank should know of
    this rank's call, if not only that it is the same; ``expected`` what it should say.
    """

    enqueue: Callable[[], None]
    stream: int | None
    buffers: list[Any]
    after: Callable[[], None] | None = None
    messages: dict[int, str] = field(default_factory=dict)
    expected: dict[int, str] = field(default_factory=dict)


def merge(plans: list[Plan]) -> Plan:
    """Return one plan for a group; raise ValueError if its buffers are of several streams."""
    streams = {plan.stream for plan in plans}
    if len(streams) > 1:
        raise ValueError(
            f"the buffers of a group are of {len(streams)} streams; make a group for each"
        )

    def enqueue() -> None:
        for plan in plans:
            plan.enqueue()

    steps = [plan.after for plan in plans if plan.after is not None]

    def after() -> None:
        for step in steps:
            step()

    def joined(texts: list[dict[int, str]]) -> dict[int, str]:
        ranks = {rank for text in texts for rank in text}
        return {rank: "; ".join(text.get(rank, "") for text in texts) for rank in ranks}

    return Plan(
        enqueue,
        plans[0].stream,
        [buffer for plan in plans for buffer in plan.buffers],
        after if steps else None,
        joined([plan.messages for plan in plans]),
        joined([plan.expected for plan in plans]),
    )
